// The paged KV cache and attention over it.
//
// Layout: [block][layer][key, value][token in block][kv head][head dim], so that a block is contiguous.
#pragma once
#include "interface.h"
#include "vectors.h"

static inline void fetch(const float* from, int floats) {
    for (int i = 0; i < floats; i += 16) __builtin_prefetch(from + i, 0, 3);
}

// Attention of one query row for the query heads of one kv head, over the tokens [first, last] of its sequence.
template <int DV>
static void attend(const Cache& cache, int layer, const int32_t* table, int first, int last, int kv_head, int group,
                   const float* query, float scale, float cap, float* scores, int score_stride, float* out) {
    const int size = DV * W, bs = cache.block_size, stride = cache.kv_heads * size, count = last - first + 1;
    for (int t = first; t <= last;) {
        int in_block = t % bs, n = bs - in_block < last + 1 - t ? bs - in_block : last + 1 - t;
        const int64_t offset = int64_t(in_block) * stride + kv_head * size;
        const float* key = cache.at(table[t / bs], layer, 0) + offset;
        const float* value = cache.at(table[t / bs], layer, 1) + offset;
        const float* next = t + n <= last ? cache.at(table[t / bs + 1], layer, 0) + kv_head * size : key;
        for (int j = 0; j < n; j += 4) {
            // A head's share of a token is too short for the hardware to predict the address of the next one.
            for (int i = j; i < j + 4; i++) {
                fetch(next + int64_t(i) * stride, size);
                fetch(value + int64_t(i) * stride, size);
            }
            const float* k[4];
            for (int i = 0; i < 4; i++) k[i] = key + int64_t(j + (j + i < n ? i : 0)) * stride;
            for (int g = 0; g < group; g++) {
                vec acc[4] = {};
                for (int d = 0; d < DV; d++) {
                    vec q = load(query + g * size + d * W);
                    for (int i = 0; i < 4; i++) acc[i] = multiply_add(q, load(k[i] + d * W), acc[i]);
                }
                vec4 s = sums(acc[0], acc[1], acc[2], acc[3]) * scale;
                for (int i = 0; i < 4 && j + i < n; i++) scores[g * score_stride + t - first + j + i] = s[i];
            }
        }
        t += n;
    }
    for (int g = 0; g < group; g++) {
        float* s = scores + g * score_stride;
        int padded = (count + W - 1) / W * W;
        for (int i = count; i < padded; i++) s[i] = -1e30f;
        if (cap > 0) {
            for (int i = 0; i < padded; i += W) store(s + i, cap * tanh(load(s + i) / cap));
            for (int i = count; i < padded; i++) s[i] = -1e30f;
        }
        vec top = all(-1e30f);
        for (int i = 0; i < padded; i += W) top = max(top, load(s + i));
        float most = max(top);
        vec total = {};
        for (int i = 0; i < padded; i += W) {
            vec e = exp(load(s + i) - most);
            store(s + i, e);
            total += e;
        }
        float scale_out = 1.0f / sum(total);
        vec acc[DV] = {};
        for (int t = first; t <= last;) {
            int in_block = t % bs, n = bs - in_block < last + 1 - t ? bs - in_block : last + 1 - t;
            const float* value = cache.at(table[t / bs], layer, 1) + int64_t(in_block) * stride + kv_head * size;
            for (int j = 0; j < n; j++) {
                vec p = all(s[t - first + j]);
                for (int d = 0; d < DV; d++) acc[d] = multiply_add(p, load(value + int64_t(j) * stride + d * W), acc[d]);
            }
            t += n;
        }
        for (int d = 0; d < DV; d++) store(out + g * size + d * W, acc[d] * scale_out);
    }
}

static void attend_any(const Cache& cache, int layer, const int32_t* table, int first, int last, int kv_head, int group,
                       const float* query, float scale, float cap, float* scores, int stride, float* out) {
    switch (cache.head_dim / W) {
#define CASE(D) case D: return attend<D>(cache, layer, table, first, last, kv_head, group, query, scale, cap, scores, stride, out);
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(8) CASE(10) CASE(12) CASE(16) CASE(32)
#undef CASE
    }
}
