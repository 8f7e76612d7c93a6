#pragma once
#include <cstdint>

namespace pyrl {

constexpr int64_t kWordsAtOnce = 4;  // that are compared

// The words of `now` that are not those of `before`, and the last word of every `run` words.
//
// before, now [size] uint16                  read
// distances   [room + kWordsAtOnce] uint16   written: from the word listed before, the first from -1
// values      [room + kWordsAtOnce] uint16   written: of the words
//
// `run` is at most 65535, so that every distance fits. Returns the number of words, or -1 if there
// are more than `room`.
int64_t changed_words_cpu(const uint16_t* before, const uint16_t* now, int64_t size, int64_t run,
                          uint16_t* distances, uint16_t* values, int64_t room);

}  // namespace pyrl
