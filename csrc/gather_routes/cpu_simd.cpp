// A tile of tokens is brought layer by layer into a stage; from there every layer's stretch is
// written in whole cache lines. What does not fill a line waits in the stage for the next tile, so
// that `out` can be streamed past the caches.
#include <type_traits>
#include <utility>

#include "common/simd.hpp"
#include "gather_routes/api.hpp"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pyrl {
namespace {

using Byte = unsigned char;

constexpr int kLanes = PYRL_VECTOR_BYTES / 16;  // 16-byte lanes, each loaded from another token
constexpr int64_t kLine = 64;                   // bytes
constexpr int64_t kTile = 64;                   // tokens: they fill whole lines
constexpr int64_t kFirst = 3 << 14;             // bytes of the L1 cache
constexpr int64_t kStage = 3 << 15;             // bytes, in the L2 cache
constexpr int64_t kWidest = 256;                // bytes of a tuple that is staged
constexpr int64_t kSlack = 2 * kLine;           // behind a layer's tile in the stage, for what waits

using Lane = Vector<uint32_t, 4>;
using V = Vector<uint32_t>;

// One lane of each of kLanes tokens: four neighbouring words of 4 bytes, or two of 8.
inline V load(const Byte* const* from, int step, int64_t offset) {
  Lane x[kLanes];
  for (int i = 0; i < kLanes; ++i) __builtin_memcpy(&x[i], from[i * step] + offset, 16);
#if PYRL_VECTOR_BYTES == 64
  __m512i v = _mm512_castsi128_si512((__m128i)x[0]);
  v = _mm512_inserti32x4(v, (__m128i)x[1], 1);
  v = _mm512_inserti32x4(v, (__m128i)x[2], 2);
  return (V)_mm512_inserti32x4(v, (__m128i)x[3], 3);
#elif PYRL_VECTOR_BYTES == 32
  return (V)_mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)x[0]), (__m128i)x[1], 1);
#else
  return x[0];
#endif
}

// In every lane, words of a and b in turn (`Words` of 4 bytes at a time), from its lower or its
// higher half.
constexpr int turn(int i, int words, bool high) {
  const int lane = i / 4 * 4 + (high ? 2 : 0), j = i % 4, second = 4 * kLanes;
  return lane + (words == 1 ? j / 2 + j % 2 * second : j % 2 + j / 2 * second);
}

template <int Words, bool High, int... I>
inline V turns(V a, V b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, turn(I, Words, High)...);
#else
  return __builtin_shuffle(a, b, V{turn(I, Words, High)...});
#endif
}

template <int Words, bool High>
inline V turns(V a, V b) {
  return turns<Words, High>(a, b, std::make_integer_sequence<int, 4 * kLanes>());
}

inline void store(V x, Byte* to) { __builtin_memcpy(to, &x, sizeof x); }

// Tuples of 4 bytes: of four slots and 4 * kLanes tokens. Lane i of r[j] is of token 4 * i + j.
inline void transpose(std::integral_constant<int, 4>, const Byte* const* from, int64_t offset,
                      Byte* const* to, int64_t at) {
  V r[4];
  for (int j = 0; j < 4; ++j) r[j] = load(from + j, 4, offset);
  const V a = turns<1, false>(r[0], r[1]), b = turns<1, false>(r[2], r[3]);
  const V c = turns<1, true>(r[0], r[1]), d = turns<1, true>(r[2], r[3]);
  store(turns<2, false>(a, b), to[0] + at);
  store(turns<2, true>(a, b), to[1] + at);
  store(turns<2, false>(c, d), to[2] + at);
  store(turns<2, true>(c, d), to[3] + at);
}

// Tuples of 8 bytes: of two slots and 2 * kLanes tokens.
inline void transpose(std::integral_constant<int, 8>, const Byte* const* from, int64_t offset,
                      Byte* const* to, int64_t at) {
  const V a = load(from, 2, offset), b = load(from + 1, 2, offset);
  store(turns<2, false>(a, b), to[0] + at);
  store(turns<2, true>(a, b), to[1] + at);
}

// Layers whose slots follow one another.
struct LayerRun {
  int64_t offset, count, tuple;  // bytes within a row, layers, bytes
  Byte* const* to;               // a layer's tile in the stage
};

// Some tokens, from token m of the tile on.
template <int Tuple, int64_t Some>
inline void bring_some(const Byte* const* from, const LayerRun& run, int64_t m) {
  int64_t done = 0;
  if constexpr (Tuple == 4 || Tuple == 8) {
    constexpr int kSlots = 16 / Tuple, kTokens = kLanes * kSlots;
    if (run.count >= kSlots) {
      for (int64_t t = 0; t < Some; t += kTokens)
        for (int64_t i = 0; i < run.count; i += kSlots) {  // the last slots may overlap others
          const int64_t first = i + kSlots <= run.count ? i : run.count - kSlots;
          transpose(std::integral_constant<int, Tuple>(), from + t, run.offset + first * Tuple,
                    run.to + first, (m + t) * Tuple);
        }
      done = run.count;
    }
  }
  const int64_t tuple = Tuple ? Tuple : run.tuple;
  for (int64_t i = done; i < run.count; ++i)
    for (int64_t t = 0; t < Some; ++t)
      __builtin_memcpy(run.to[i] + (m + t) * tuple, from[t] + run.offset + i * tuple, tuple);
}

// A tile of tokens, `Some` at a time, while those of the next tile are fetched: runs of rows are
// short, and the hardware prefetcher sees too little.
template <int Tuple, int64_t Some>
inline void bring_tile(const Byte* const* from, const Byte* const* next, const LayerRun& run) {
  for (int64_t m = 0; m < kTile; m += Some) {
    for (int64_t t = m; t < m + Some; ++t)
      for (int64_t b = 0; b < run.count * run.tuple; b += kLine)
        __builtin_prefetch(next[t] + run.offset + b);
    bring_some<Tuple, Some>(from + m, run, m);
  }
}

// A line of a row holds tuples of several layers: it is to stay in the L1 cache until the
// last of them.
template <int Tuple>
void bring(const Byte* const* from, const Byte* const* next, const LayerRun& run) {
  const bool stays = run.count * run.tuple * kTile <= kFirst;
  stays ? bring_tile<Tuple, kTile>(from, next, run) : bring_tile<Tuple, 16>(from, next, run);
}

using Bring = void (*)(const Byte* const*, const Byte* const*, const LayerRun&);

Bring bring_for(int64_t tuple) {
  switch (tuple) {
    case 1: return bring<1>;
    case 2: return bring<2>;
    case 3: return bring<3>;
    case 4: return bring<4>;
    case 6: return bring<6>;
    case 8: return bring<8>;
    case 12: return bring<12>;
    case 16: return bring<16>;
    case 24: return bring<24>;
    case 32: return bring<32>;
    default: return bring<0>;
  }
}

// Whole cache lines; `to` is aligned to them.
template <bool Stream>
inline void put_lines(const Byte* from, Byte* to, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += PYRL_VECTOR_BYTES) {
    V v;
    __builtin_memcpy(&v, from + b, sizeof v);
#if defined(__x86_64__)
    if constexpr (Stream) {
#if PYRL_VECTOR_BYTES == 64
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + b), (__m512i)v);
#elif PYRL_VECTOR_BYTES == 32
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + b), (__m256i)v);
#else
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + b), (__m128i)v);
#endif
      continue;
    }
#endif
    store(v, to + b);
  }
}

// The padding row m, which is the same in every layer, at `at` bytes from to[layer].
template <class T>
inline void pad(const GatherRoutesArgs& r, int64_t m, Byte* const* to, int64_t at,
                int64_t layers) {
  for (int64_t j = 0; j < r.top_k; ++j) {
    const T expert = static_cast<T>((m * r.top_k + j) % r.num_experts);
    for (int64_t i = 0; i < layers; ++i)
      __builtin_memcpy(to[i] + at + j * sizeof(T), &expert, sizeof expert);
  }
}

constexpr int64_t kGroup = kStage / (kTile + kSlack);  // layers at most

// Some layers for the output rows [begin, end).
template <class T>
struct Group {
  const GatherRoutesArgs& r;
  const int64_t *layers, count, begin, end, tuple;
  const Bring bring_run;
  Byte* out[kGroup];   // where the next line of a layer goes
  Byte* line[kGroup];  // that line in the stage, its first `waiting` bytes not yet written
  Byte* to[kGroup];    // where the next tile goes in the stage
  int64_t waiting[kGroup];
  alignas(kLine) Byte stage[kStage];

  Group(const GatherRoutesArgs& r, int64_t first, int64_t count, int64_t begin, int64_t end)
      : r(r), layers(r.layers + first), count(count), begin(begin), end(end),
        tuple(r.top_k * sizeof(T)), bring_run(bring_for(tuple)) {
    for (int64_t i = 0; i < count; ++i) {
      Byte* const at = static_cast<Byte*>(r.out) + ((first + i) * r.num_out + begin) * tuple;
      waiting[i] = reinterpret_cast<uintptr_t>(at) % kLine;
      out[i] = at - waiting[i];
      line[i] = stage + i * (kTile * tuple + kSlack);
      to[i] = line[i] + waiting[i];
    }
  }

  // Where the rows of the tile from m on are read; any readable address where there is none.
  void locate(int64_t m, const Byte** from) const {
    for (int64_t t = 0; t < kTile; ++t) {
      const int64_t row = m + t < end ? r.rows[m + t] : 0;
      from[t] = static_cast<const Byte*>(r.routes) + (row < 0 ? 0 : row) * r.row_bytes;
    }
  }

  // The tile of output rows from m on, into the stage.
  void fill(int64_t m, int64_t tokens) {
    const Byte *from[kTile], *next[kTile];
    locate(m, from);
    locate(m + kTile, next);
    for (int64_t i = 0, stop; i < count && r.num_src > 0; i = stop) {
      stop = i + 1;
      while (stop < count && layers[stop] == layers[i] + (stop - i)) ++stop;
      bring_run(from, next, {layers[i] * tuple, stop - i, tuple, to + i});
    }
    for (int64_t t = 0; t < tokens; ++t)
      if (r.rows[m + t] < 0) pad<T>(r, m + t, to, t * tuple, count);
  }

  // Writes the whole lines of the stage; of the first tile also a part of a line, of the last tile
  // everything.
  template <bool Stream>
  void flush(bool first, bool last, int64_t tokens) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t have = waiting[i] + tokens * tuple, whole = have / kLine * kLine;
      int64_t done = 0;
      if (first && waiting[i] > 0) {
        done = have < kLine ? have : kLine;
        __builtin_memcpy(out[i] + waiting[i], line[i] + waiting[i], done - waiting[i]);
      }
      if (done < whole) put_lines<Stream>(line[i] + done, out[i] + done, whole - done);
      if (last) {
        done = done > whole ? done : whole;
        __builtin_memcpy(out[i] + done, line[i] + done, have - done);
      } else {
        __builtin_memcpy(line[i], line[i] + whole, kLine);
        out[i] += whole;
      }
    }
  }

  template <bool Stream>
  void run() {
    for (int64_t m = begin; m < end; m += kTile) {
      const int64_t tokens = end - m < kTile ? end - m : kTile;
      fill(m, tokens);
      flush<Stream>(m == begin, m + tokens == end, tokens);
    }
  }
};

// Tuples too wide for the stage, each copied straight from `routes` to `out`.
template <class T>
void gather_wide(const GatherRoutesArgs& r, int64_t begin, int64_t end) {
  const int64_t tuple = r.top_k * sizeof(T);
  for (int64_t i = 0; i < r.num_layers; ++i)
    for (int64_t m = begin; m < end; ++m) {
      Byte* const to = static_cast<Byte*>(r.out) + (i * r.num_out + m) * tuple;
      const auto* routes = static_cast<const Byte*>(r.routes) + r.layers[i] * tuple;
      if (r.rows[m] < 0)
        pad<T>(r, m, &to, 0, 1);
      else
        __builtin_memcpy(to, routes + r.rows[m] * r.row_bytes, tuple);
    }
}

template <class T>
void gather(const GatherRoutesArgs& r, bool stream, int64_t begin, int64_t end) {
  const int64_t tuple = r.top_k * sizeof(T);
  if (tuple > kWidest) return gather_wide<T>(r, begin, end);
  const int64_t group = kStage / (kTile * tuple + kSlack);
  for (int64_t i = 0; i < r.num_layers; i += group) {
    const int64_t count = r.num_layers - i < group ? r.num_layers - i : group;
    Group<T> some(r, i, count, begin, end);
    stream ? some.template run<true>() : some.template run<false>();
  }
#if defined(__x86_64__)
  if (stream) _mm_sfence();
#endif
}

void run(const GatherRoutesArgs& r, bool stream, int64_t begin, int64_t end) {
  return r.dtype == DType::u8 ? gather<uint8_t>(r, stream, begin, end)
                              : gather<uint16_t>(r, stream, begin, end);
}

}  // namespace

const GatherRoutes PYRL_KERNELS(gather_routes) = run;

}  // namespace pyrl
