#pragma once
#include <cstdint>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace pyrl {

// Asks the system to back a large output with huge pages. A new buffer has no memory behind it yet,
// and faulting that in 4 KiB at a time takes several times as long as writing it. Has no effect on
// pages that are already there, nor on buffers that hold no whole huge page.
inline void want_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kHuge = 1 << 21;
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t begin = (address + kHuge - 1) / kHuge * kHuge;
  const uintptr_t end = (address + static_cast<uintptr_t>(bytes)) / kHuge * kHuge;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace pyrl
