// Vectors of floats as wide as the machine's registers, through the compilers' vector extension: no intrinsics, so the
// same source serves x86 and ARM.
//
// Invariant of everything built on these: the sequence of floating-point operations behind one row of a result
// depends on that row's own inputs alone, never on the number of other rows or threads. That makes generation
// bitwise independent of the batch.
#pragma once
#include <cstdint>

#if defined(__AVX512F__)
constexpr int W = 16;
#else
constexpr int W = 8;
#endif

typedef float vec __attribute__((vector_size(W * 4)));
typedef int32_t ivec __attribute__((vector_size(W * 4)));
typedef float vec_at __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef float vec4 __attribute__((vector_size(16)));

static inline vec load(const float* p) { return *reinterpret_cast<const vec_at*>(p); }
static inline void store(float* p, vec v) { *reinterpret_cast<vec_at*>(p) = v; }
static inline vec all(float s) { return s - vec{}; }  // not `+`: adding to -0 is real work

// The sums of four vectors, in one fixed order of additions.
#if defined(__AVX512F__)
static inline vec pair_sums(vec a, vec b) {
    return __builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
           __builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
}
static inline vec4 sums(vec a, vec b, vec c, vec d) {
    vec s = pair_sums(pair_sums(a, b), pair_sums(c, d));
    return (__builtin_shufflevector(s, s, 0, 1, 2, 3) + __builtin_shufflevector(s, s, 4, 5, 6, 7)) +
           (__builtin_shufflevector(s, s, 8, 9, 10, 11) + __builtin_shufflevector(s, s, 12, 13, 14, 15));
}
#else
static inline vec pair_sums(vec a, vec b) {
    return __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14) +
           __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
}
static inline vec4 sums(vec a, vec b, vec c, vec d) {
    vec s = pair_sums(pair_sums(a, b), pair_sums(c, d));
    return __builtin_shufflevector(s, s, 0, 1, 2, 3) + __builtin_shufflevector(s, s, 4, 5, 6, 7);
}
#endif
static inline float sum(vec a) { return sums(a, vec{}, vec{}, vec{})[0]; }

static inline vec max(vec a, vec b) { return a > b ? a : b; }
static inline float max(vec a) {
    float m = a[0];
    for (int i = 1; i < W; i++) m = a[i] > m ? a[i] : m;
    return m;
}

// exp for x <= 88, within 2 units in the last place; below -87 it is 0.
static inline vec exp(vec x) {
    const vec round = all(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    vec low = all(-87.0f);
    vec y = x < low ? low : x;  // so written, what is not a number stays what it is
    vec n = (y * 1.44269504088896341f + round) - round;
    vec r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    ivec bits = (__builtin_convertvector(n, ivec) + 127) << 23;
    vec result = p * (vec)bits;  // the bits of 2^n, read as floats
    return x < low ? vec{} : result;
}
