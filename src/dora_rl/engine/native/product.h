// Products of a few rows with a large matrix that is read where it lies, row-major [out, in].
#pragma once
#include "vectors.h"

#if defined(__AVX512F__)
constexpr int MR = 6;
#else
constexpr int MR = 3;
#endif
constexpr int NR = 4;  // weight rows of a tile: their four sums are one short vector, stored at once
constexpr int L1_WEIGHTS = 20480;  // bytes of weights that leave room for a tile of x in a first-level cache
constexpr int M_BLOCK = 126;  // rows of x that stay in the second-level cache

// out[m] = the products of row m of x with NR rows of w.
template <int ROWS>
static inline void tile(const float* const* x, const float* const* w, int depth, vec4* out) {
    vec acc[ROWS][NR] = {};
    for (int k = 0; k < depth; k += W) {
        vec b[NR];
        for (int n = 0; n < NR; n++) b[n] = load(w[n] + k);
        for (int m = 0; m < ROWS; m++) {
            vec a = load(x[m] + k);
            for (int n = 0; n < NR; n++) acc[m][n] += a * b[n];
        }
    }
    for (int m = 0; m < ROWS; m++) out[m] = sums(acc[m][0], acc[m][1], acc[m][2], acc[m][3]);
}

static inline void tile_rows(int rows, const float* const* x, const float* const* w, int depth, vec4* out) {
    switch (rows) {
        case 1: return tile<1>(x, w, depth, out);
        case 2: return tile<2>(x, w, depth, out);
        case 3: return tile<3>(x, w, depth, out);
#if defined(__AVX512F__)
        case 4: return tile<4>(x, w, depth, out);
        case 5: return tile<5>(x, w, depth, out);
        default: return tile<6>(x, w, depth, out);
#endif
    }
}

// The first `count` of four neighbouring numbers.
static inline void store4(float* p, vec4 v, int count) {
    if (count == NR) *reinterpret_cast<vec4_at*>(p) = v;
    else
        for (int i = 0; i < count; i++) p[i] = v[i];
}
static inline void add4(float* p, vec4 v, int count) {
    if (count == NR) *reinterpret_cast<vec4_at*>(p) += v;
    else
        for (int i = 0; i < count; i++) p[i] += v[i];
}
static inline vec4 load4(const float* p, int count) {
    vec4 v = {};
    for (int i = 0; i < count; i++) v[i] = p[i];
    return v;
}

// put(m, n, values, count) for all m < rows and the columns n0 <= n < n1, four or fewer at once, values = x[m] . w[n ...].
// x_at(m) gives row m.
template <class XAt, class Put>
static inline void product(int rows, XAt x_at, const float* w, int depth, int n0, int n1, Put put) {
    // Columns whose weights stay in the first-level cache while the rows pass by.
    const int fitting = L1_WEIGHTS / (depth * int(sizeof(float))) / NR * NR, wide = fitting < NR ? NR : fitting;
    for (int block = 0; block < rows; block += M_BLOCK) {
        int end = block + M_BLOCK < rows ? block + M_BLOCK : rows;
        for (int first = n0; first < n1; first += wide) {
            const int last = first + wide < n1 ? first + wide : n1;
            // While these weights are multiplied, the next ones are on their way from memory. With few rows the machine's
            // own prefetching is ahead of us.
            const char* ahead = reinterpret_cast<const char*>(w + int64_t(last) * depth);
            const int64_t next = last + wide < n1 ? wide : n1 - last;
            const int64_t bytes = end - block > 2 * MR ? next * depth * int64_t(sizeof(float)) : 0;
            const int64_t share = bytes / ((end - block + MR - 1) / MR) + 64;
            for (int m = block; m < end; m += MR) {
                int some = m + MR <= end ? MR : end - m;
                int64_t from = (m - block) / MR * share, to = from + share < bytes ? from + share : bytes;
                for (int64_t at = from; at < to; at += 64) __builtin_prefetch(ahead + at, 0, 2);
                const float* xp[MR];
                for (int i = 0; i < some; i++) xp[i] = x_at(m + i);
                for (int n = first; n < last; n += NR) {
                    int cols = n + NR <= last ? NR : last - n;
                    const float* wp[NR];
                    for (int i = 0; i < NR; i++) wp[i] = w + int64_t(n + (i < cols ? i : 0)) * depth;
                    vec4 out[MR];
                    tile_rows(some, xp, wp, depth, out);
                    for (int i = 0; i < some; i++) put(m + i, n, out[i], cols);
                }
            }
        }
    }
}
