// Products of rows with a large matrix that is not copied, row-major [out, in].
//
// A panel of columns is transposed into a small buffer, and all rows are multiplied with it there, a tile of rows at a
// time, with columns in the lanes. Each number is one chain of multiply-adds over k in order, whatever the tile, so its
// bits are the same in any batch. While a panel is computed, the next one is prefetched from memory.
//
// Matrices of a model that fits into the caches may be packed already, one panel after the other: [n / PANEL][k][PANEL],
// the last one padded with zeros. A panel then begins where its first column would, at w + n * depth.
#pragma once
#include <algorithm>
#include <utility>

#include "vectors.h"

#if defined(__AVX512F__)
constexpr int MR = 14;  // rows of a tile: with two vectors of columns each, their sums fill the registers
#else
constexpr int MR = 6;
#endif
constexpr int PANEL = 2 * W;  // columns
constexpr int FEW = 8;        // rows up to which memory is the limit and a panel does not pay; measured
constexpr int STEPS = 8;      // of k between two prefetches; every depth is a multiple

// Memory that is needed soon, prefetched a few cache lines at a time.
struct Prefetch {
    const char *at, *end;
    void fetch(int lines) {
        for (int i = 0; i < lines && at < end; i++, at += 64) __builtin_prefetch(at, 0, 2);
    }
};

// One step of a transposition: r[j] and r[j + N] exchange the halves of their lanes that are N lanes off.
template <int N, size_t... I>
static inline void exchange(vec& a, vec& b, std::index_sequence<I...>) {
    vec low = __builtin_shufflevector(a, b, (I & N ? int(I) - N + W : int(I))...);
    b = __builtin_shufflevector(a, b, (I & N ? int(I) + W : int(I) + N)...);
    a = low;
}
template <int N>
static inline void exchange_all(vec* r) {
    for (int i = 0; i < W; i += 2 * N)
        for (int j = i; j < i + N; j++) exchange<N>(r[j], r[j + N], std::make_index_sequence<W>());
}

// r[i] = the numbers k + i of W columns.
static inline void transposed(const float* const* column, int k, vec* r) {
    for (int i = 0; i < W; i++) r[i] = load(column[i] + k);
    exchange_all<1>(r);
    exchange_all<2>(r);
    exchange_all<4>(r);
    if constexpr (W == 16) exchange_all<8>(r);
}

// With few rows memory is the limit, and prefetching just ahead of the reads keeps it busiest: further along these
// columns, and at their ends the start of the next ones.
static inline void prefetch_columns(const float* const* column, int k, int depth) {
    constexpr int NEAR = 64;
    const int64_t to = k + NEAR < depth ? k + NEAR : k + NEAR + int64_t(W - 1) * depth;
    for (int i = 0; i < W; i++) __builtin_prefetch(column[i] + to, 0, 3);
}

// panel[k][n] = w[n][k]. Half a panel at a time: the hardware prefetches sixteen streams better than thirty-two.
static void pack(const float* const* column, int depth, float* panel, Prefetch& ahead, int lines) {
    for (int half = 0; half < PANEL; half += W)
        for (int k = 0; k < depth; k += W) {
            ahead.fetch(lines);
            vec r[W];
            transposed(column + half, k, r);
            for (int i = 0; i < W; i++) store(panel + int64_t(k + i) * PANEL + half, r[i]);
        }
}

// The products of few rows with W columns, which are transposed in registers.
template <int ROWS>
static void thin(const float* x, int64_t stride, const float* const* column, int depth, vec* out) {
    vec sum[ROWS] = {};
    for (int k = 0; k < depth; k += W) {
        prefetch_columns(column, k, depth);
        vec r[W];
        transposed(column, k, r);
        for (int i = 0; i < W; i++)
            for (int m = 0; m < ROWS; m++) sum[m] = multiply_add(all(x[m * stride + k + i]), r[i], sum[m]);
    }
    for (int m = 0; m < ROWS; m++) out[m] = sum[m];
}

static void thin_rows(int rows, const float* x, int64_t stride, const float* const* column, int depth, vec* out) {
    switch (rows) {
#define CASE(R) case R: return thin<R>(x, stride, column, depth, out);
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
    }
}

template <int ROWS>
static void tile(const float* x, int64_t stride, const float* panel, int depth, vec (*out)[2], Prefetch& ahead, int lines) {
    vec sum[ROWS][2] = {};
    const float* third[(ROWS + 2) / 3];  // every third row has a pointer: the others are one or two strides away
    for (int i = 0; i < (ROWS + 2) / 3; i++) third[i] = x + i * 3 * stride;
    for (int k = 0; k < depth; k += STEPS) {
        ahead.fetch(lines);
        UNROLL_NEVER  // unrolled, the loop would need more registers than there are
        for (int i = k; i < k + STEPS; i++, panel += PANEL) {
            vec left = load(panel), right = load(panel + W);
            UNROLL_FULLY
            for (int m = 0; m < ROWS; m++) {
                vec a = all(third[m / 3][m % 3 * stride + i]);
                sum[m][0] = multiply_add(a, left, sum[m][0]);
                sum[m][1] = multiply_add(a, right, sum[m][1]);
            }
        }
    }
    for (int m = 0; m < ROWS; m++) out[m][0] = sum[m][0], out[m][1] = sum[m][1];
}

static void tile_rows(int rows, const float* x, int64_t stride, const float* panel, int depth, vec (*out)[2],
                      Prefetch& ahead, int lines) {
    switch (rows) {
#define CASE(R) case R: return tile<R>(x, stride, panel, depth, out, ahead, lines);
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5)
#if defined(__AVX512F__)
        CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13)
#endif
        default: return tile<MR>(x, stride, panel, depth, out, ahead, lines);
#undef CASE
    }
}

// Store, add or load the first `count` numbers of a vector.
static inline void put(float* p, vec v, int count) {
    if (count == W) store(p, v);
    else
        for (int i = 0; i < count; i++) p[i] = v[i];
}
static inline void add(float* p, vec v, int count) {
    if (count == W) store(p, load(p) + v);
    else
        for (int i = 0; i < count; i++) p[i] += v[i];
}
static inline vec some(const float* p, int count) {
    if (count == W) return load(p);
    vec v = {};
    for (int i = 0; i < count; i++) v[i] = p[i];
    return v;
}

// All rows with one panel, in tiles of nearly equal size.
template <class Take>
static void panel_rows(int rows, const float* x, int64_t stride, const float* panel, int depth, int n, int columns,
                       Prefetch& ahead, int lines, Take& take) {
    const int tiles = (rows + MR - 1) / MR;
    for (int t = 0, m = 0, size; t < tiles; t++, m += size) {
        size = (rows - m + tiles - t - 1) / (tiles - t);
        vec out[MR][2];
        tile_rows(size, x + m * stride, stride, panel, depth, out, ahead, lines);
        for (int i = 0; i < size; i++) {
            take(m + i, n, out[i][0], std::min(W, columns));
            if (columns > W) take(m + i, n + W, out[i][1], columns - W);
        }
    }
}

// take(m, n, values, count) for all m < rows and the columns n0 <= n < n1, W or fewer at once, values = x[m] . w[n ...].
// `panel` is a buffer for one panel; `next` is what this thread will probably read next, or null.
template <class Take>
static void product(int rows, const float* x, int64_t stride, const float* w, bool packed, int depth, int n0, int n1,
                    float* panel, const float* next, Take take) {
    if (rows <= 0) return;
    // The next panel is prefetched evenly over the time of this one: transposing it takes as long as about 13 rows.
    const int lines = 200 / (13 + rows) + 1;
    for (int n = n0; n < n1; n += PANEL) {
        const int columns = std::min(PANEL, n1 - n);
        if (packed) {
            Prefetch nothing{nullptr, nullptr};
            panel_rows(rows, x, stride, w + int64_t(n) * depth, depth, n, columns, nothing, 0, take);
            continue;
        }
        const float* column[PANEL];  // columns beyond the end repeat the last one
        for (int i = 0; i < PANEL; i++) column[i] = w + int64_t(n + std::min(i, columns - 1)) * depth;
        if (rows <= FEW) {
            for (int at = 0; at < columns; at += W) {
                vec out[FEW];
                thin_rows(rows, x, stride, column + at, depth, out);
                for (int m = 0; m < rows; m++) take(m, n + at, out[m], std::min(W, columns - at));
            }
            continue;
        }
        const int left = n1 - n - columns;
        const char* then = reinterpret_cast<const char*>(left > 0 ? w + int64_t(n + columns) * depth : next);
        Prefetch ahead{then, then ? then + std::min(PANEL, left > 0 ? left : PANEL) * int64_t(depth) * 4 : then};
        pack(column, depth, panel, ahead, lines);
        panel_rows(rows, x, stride, panel, depth, n, columns, ahead, lines, take);
    }
}
