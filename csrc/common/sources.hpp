#pragma once

namespace pyrl {

// Hash of the files of csrc that this build was made from; pyrl_ext/ops/_native.py compares it with theirs.
extern const char* const sources;

}  // namespace pyrl
