// Products of a few rows with a large matrix that is read where it lies, row-major [out, in].
#pragma once
#include "vectors.h"

#if defined(__AVX512F__)
constexpr int NR = 6;
#else
constexpr int NR = 3;
#endif
constexpr int MR = 4;
constexpr int M_BLOCK = 128;  // rows of x that stay in the second-level cache

// out[n] = the products of MR rows of x with weight row n, for NR weight rows.
template <int ROWS, int COLS>
static inline void tile(const float* const* x, const float* const* w, int depth, vec4* out) {
    vec acc[ROWS][COLS] = {};
    for (int k = 0; k < depth; k += W) {
        vec b[COLS];
        for (int n = 0; n < COLS; n++) b[n] = load(w[n] + k);
        for (int m = 0; m < ROWS; m++) {
            vec a = load(x[m] + k);
            for (int n = 0; n < COLS; n++) acc[m][n] += a * b[n];
        }
    }
    for (int n = 0; n < COLS; n++)
        out[n] = sums(acc[0][n], ROWS > 1 ? acc[ROWS > 1 ? 1 : 0][n] : vec{}, ROWS > 2 ? acc[ROWS > 2 ? 2 : 0][n] : vec{},
                      ROWS > 3 ? acc[ROWS > 3 ? 3 : 0][n] : vec{});
}

template <int COLS>
static inline void tile_rows(int rows, const float* const* x, const float* const* w, int depth, vec4* out) {
    switch (rows) {
        case 1: return tile<1, COLS>(x, w, depth, out);
        case 2: return tile<2, COLS>(x, w, depth, out);
        case 3: return tile<3, COLS>(x, w, depth, out);
        default: return tile<4, COLS>(x, w, depth, out);
    }
}

// put(m, n, value) for all m < rows and n0 <= n < n1, value = x[m] . w[n]. x_at(m) gives row m.
template <class XAt, class Put>
static inline void product(int rows, XAt x_at, const float* w, int depth, int n0, int n1, Put put) {
    for (int block = 0; block < rows; block += M_BLOCK) {
        int end = block + M_BLOCK < rows ? block + M_BLOCK : rows;
        for (int n = n0; n < n1; n += NR) {
            int cols = n + NR <= n1 ? NR : n1 - n;
            const float* wp[NR];
            for (int i = 0; i < NR; i++) wp[i] = w + int64_t(n + (i < cols ? i : 0)) * depth;
            // While these weights are multiplied, the next ones are on their way from memory. With few rows the machine's own
            // prefetching is ahead of us.
            const char* ahead = reinterpret_cast<const char*>(w + int64_t(n + NR) * depth);
            const int64_t bytes = n + NR < n1 && end - block > 2 * MR ? int64_t(NR) * depth * sizeof(float) : 0;
            const int64_t share = bytes / ((end - block + MR - 1) / MR) + 64;
            for (int m = block; m < end; m += MR) {
                int some = m + MR <= end ? MR : end - m;
                int64_t from = (m - block) / MR * share, to = from + share < bytes ? from + share : bytes;
                for (int64_t at = from; at < to; at += 64) __builtin_prefetch(ahead + at, 0, 2);
                const float* xp[MR];
                for (int i = 0; i < some; i++) xp[i] = x_at(m + i);
                vec4 out[NR];
                tile_rows<NR>(some, xp, wp, depth, out);
                for (int j = 0; j < cols; j++)
                    for (int i = 0; i < some; i++) put(m + i, n + j, out[j][i]);
            }
        }
    }
}
