// One forward pass of a decoder of the Llama family over a flat list of rows, each row one token of one sequence.
//
// - Decode rows and prefill rows are the same: a token with a position and a block table. All keys and values of a layer
//   are written before any row attends, so the tokens of a prompt chunk see each other.
// - Weights are read in place (mapped files), row-major [out, in]; no copy of them outlives a panel. Those of a small model
//   may be packed (see product.h).
// - Work is divided into small jobs, so a thread that the system interrupts does not delay the others for long.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention.h"
#include "product.h"
#include "team.h"

static inline vec silu_times(vec g, vec u) {
    vec x = -g;
    return g / (1.0f + exp(x < 87.0f ? x : all(87.0f))) * u;
}

// Columns of a product in one job: about eight slices per thread, of whole panels.
static inline int slice_columns(int columns, int threads) {
    int size = columns / (threads * 8) / PANEL * PANEL;
    return size < PANEL ? PANEL : size > 6 * PANEL ? 6 * PANEL : size;
}

static inline void rms_norm(const float* x, const float* weight, float eps, int size, float* out) {
    vec square = {};
    for (int i = 0; i < size; i += W) {
        vec v = load(x + i);
        square = multiply_add(v, v, square);
    }
    float scale = 1.0f / std::sqrt(sum(square) / size + eps);
    for (int i = 0; i < size; i += W) store(out + i, load(weight + i) * (load(x + i) * scale));
}

static inline void rotate(float* head, const float* cos, const float* sin, int size) {
    int half = size / 2;
    for (int i = 0; i < half; i++) {
        float a = head[i], b = head[i + half];
        head[i] = multiply_add(a, cos[i], -(b * sin[i]));
        head[i + half] = multiply_add(b, cos[i + half], a * sin[i + half]);
    }
}

// The experts of each row: softmax over the router's scores, the best `experts_used`, ties to the lower index.
static void route(const Model& m, const float* scores, int32_t* chosen, float* weight) {
    float most = scores[0], total = 0;
    for (int e = 1; e < m.experts; e++) most = scores[e] > most ? scores[e] : most;
    for (int e = 0; e < m.experts; e++) total += exp(scores[e] - most);
    float kept = 0;
    for (int i = 0; i < m.experts_used; i++) {
        int best = -1;
        for (int e = 0; e < m.experts; e++) {
            bool taken = false;
            for (int j = 0; j < i; j++) taken |= chosen[j] == e;
            if (!taken && (best < 0 || scores[e] > scores[best])) best = e;
        }
        chosen[i] = best;
        weight[i] = exp(scores[best] - most) / total;
        kept += weight[i];
    }
    if (m.norm_topk)
        for (int i = 0; i < m.experts_used; i++) weight[i] /= kept;
}

struct Scratch {
    float *hidden, *normed, *qkv, *attended, *inner, *upper, *scores, *router, *weight, *mixed, *panels;
    int64_t panel;  // floats of one thread's panel
    float* panel_of(const Team::Round& round) const { return panels + round.thread() * panel; }
    int32_t *chosen, *by_expert, *expert_start;
};

static int64_t lay_out(const Model& m, int rows, int threads, int context, float* base, Scratch* s) {
    int64_t used = 0;
    auto take = [&](int64_t floats) {
        float* p = base + used;
        used += (floats + 15) / 16 * 16;
        return p;
    };
    int64_t qkv = int64_t(m.heads + 2 * m.kv_heads) * m.head_dim, picks = int64_t(rows) * m.experts_used;
    Scratch t;
    t.hidden = take(int64_t(rows) * m.hidden);
    t.normed = take(int64_t(rows) * m.hidden);
    t.qkv = take(rows * qkv);
    t.attended = take(int64_t(rows) * m.heads * m.head_dim);
    int64_t inner = int64_t(rows) * m.inner, expert = picks * m.expert_inner;
    t.inner = take(inner > expert ? inner : expert);
    t.upper = take(inner > expert ? inner : expert);
    t.scores = take(int64_t(threads) * (m.heads / m.kv_heads) * (context + 2 * W));
    t.router = take(int64_t(rows) * m.experts);
    t.weight = take(picks);
    t.mixed = take(picks * m.hidden);
    t.panel = PANEL * int64_t(std::max({m.hidden, m.heads * m.head_dim, m.inner, m.expert_inner}));
    t.panels = take(threads * t.panel);
    t.chosen = reinterpret_cast<int32_t*>(take(picks));
    t.by_expert = reinterpret_cast<int32_t*>(take(picks));
    t.expert_start = reinterpret_cast<int32_t*>(take(m.experts + 1));
    if (s) *s = t;
    return used;
}

// A product with one matrix, whose columns are cut into slices that the threads take in turn.
template <class Take>
static void multiply_in_slices(Team::Round& round, int threads, const Scratch& s, int rows, const float* x, const float* w,
                      bool packed, int depth, int columns, Take take) {
    const int slice = slice_columns(columns, threads);
    round.each((columns + slice - 1) / slice, [&](int i) {
        int n0 = i * slice, n1 = std::min(n0 + slice, columns), later = n0 + threads * slice;
        const float* next = later + PANEL <= columns ? w + int64_t(later) * depth : nullptr;
        product(rows, x, depth, w, packed, depth, n0, n1, s.panel_of(round), next, take);
    });
}

static void project_qkv(const Model& m, const Layer& l, int R, const Scratch& s, Team::Round& round, int threads) {
    const int q_size = m.heads * m.head_dim, kv_size = m.kv_heads * m.head_dim, qkv = q_size + 2 * kv_size;
    const int slice = slice_columns(qkv, threads), nq = (q_size + slice - 1) / slice, nkv = (kv_size + slice - 1) / slice;
    round.each(nq + 2 * nkv, [&](int job) {
        int part = job < nq ? 0 : job < nq + nkv ? 1 : 2;
        int index = part == 0 ? job : part == 1 ? job - nq : job - nq - nkv;
        int columns = part == 0 ? q_size : kv_size, offset = part == 0 ? 0 : part == 1 ? q_size : q_size + kv_size;
        const float* w = part == 0 ? l.q : part == 1 ? l.k : l.v;
        const float* bias = part == 0 ? l.q_bias : part == 1 ? l.k_bias : l.v_bias;
        int n0 = index * slice, n1 = std::min(n0 + slice, columns), later = n0 + threads * slice;
        const float* next = later + PANEL <= columns ? w + int64_t(later) * m.hidden : nullptr;
        product(R, s.normed, m.hidden, w, m.packed, m.hidden, n0, n1, s.panel_of(round), next,
                [&](int r, int n, vec v, int count) {
                    put(s.qkv + int64_t(r) * qkv + offset + n, bias ? v + some(bias + n, count) : v, count);
                });
    });
}

// Norm and rotation of one row's queries and keys; its keys and values go into the cache.
static void write_kv(const Model& m, const Layer& l, int layer, const Cache& cache, const Rows& rows, int r, float* q) {
    const int width = m.head_dim, q_size = m.heads * width, kv_size = m.kv_heads * width, pos = rows.position[r];
    float *k = q + q_size, *v = k + kv_size;
    const float *cos = m.cos + int64_t(pos) * width, *sin = m.sin + int64_t(pos) * width;
    if (l.q_norm && m.full_qk_norm) {
        rms_norm(q, l.q_norm, m.eps, q_size, q);
        rms_norm(k, l.k_norm, m.eps, kv_size, k);
    } else if (l.q_norm) {
        for (int h = 0; h < m.heads; h++) rms_norm(q + h * width, l.q_norm, m.eps, width, q + h * width);
        for (int h = 0; h < m.kv_heads; h++) rms_norm(k + h * width, l.k_norm, m.eps, width, k + h * width);
    }
    for (int h = 0; h < m.heads; h++) rotate(q + h * width, cos, sin, width);
    for (int h = 0; h < m.kv_heads; h++) rotate(k + h * width, cos, sin, width);
    int32_t block = rows.table[int64_t(rows.sequence[r]) * rows.table_stride + pos / cache.block_size];
    int64_t at = int64_t(pos % cache.block_size) * kv_size;
    std::memcpy(cache.at(block, layer, 0) + at, k, sizeof(float) * kv_size);
    std::memcpy(cache.at(block, layer, 1) + at, v, sizeof(float) * kv_size);
}

static void attention_half(const Model& m, const Layer& l, int layer, const Cache& cache, const Rows& rows,
                           const Scratch& s, Team::Round& round, int threads, int context) {
    const int width = m.head_dim, q_size = m.heads * width, qkv = q_size + 2 * m.kv_heads * width;
    const int group = m.heads / m.kv_heads, R = rows.count, stride = context + 2 * W;
    round.each(R, [&](int r) {
        rms_norm(s.hidden + int64_t(r) * m.hidden, l.input_norm, m.eps, m.hidden, s.normed + int64_t(r) * m.hidden);
    });
    project_qkv(m, l, R, s, round, threads);
    round.each(R, [&](int r) { write_kv(m, l, layer, cache, rows, r, s.qkv + int64_t(r) * qkv); });
    round.each(R * m.kv_heads, [&](int job) {
        int r = job / m.kv_heads, h = job % m.kv_heads;
        attend_any(cache, layer, rows.table + int64_t(rows.sequence[r]) * rows.table_stride, 0, rows.position[r], h, group,
                   s.qkv + int64_t(r) * qkv + h * group * width, m.scale, 0.0f,
                   s.scores + int64_t(round.thread()) * group * stride, stride,
                   s.attended + int64_t(r) * q_size + h * group * width);
    });
    multiply_in_slices(round, threads, s, R, s.attended, l.o, m.packed, q_size, m.hidden, [&](int r, int n, vec v, int count) {
        add(s.hidden + int64_t(r) * m.hidden + n, l.o_bias ? v + some(l.o_bias + n, count) : v, count);
    });
}

// inner[r] = silu(gate . x) * (up . x) for the columns [n0, n1); `upper` holds up . x meanwhile.
static void gated(int rows, const float* x, const float* gate, const float* up, bool packed, int depth, int n0, int n1,
                  float* inner, float* upper, int64_t stride, float* panel, const float* next) {
    product(rows, x, depth, gate, packed, depth, n0, n1, panel, up + int64_t(n0) * depth,
            [&](int r, int n, vec v, int count) { put(inner + r * stride + n, v, count); });
    product(rows, x, depth, up, packed, depth, n0, n1, panel, next,
            [&](int r, int n, vec v, int count) { put(upper + r * stride + n, v, count); });
    for (int r = 0; r < rows; r++) {
        float *g = inner + r * stride, *u = upper + r * stride;
        int n = n0;
        for (; n + W <= n1; n += W) store(g + n, silu_times(load(g + n), load(u + n)));
        for (; n < n1; n++) g[n] = silu_times(all(g[n]), all(u[n]))[0];
    }
}

static void dense_half(const Model& m, const Layer& l, int R, const Scratch& s, Team::Round& round, int threads) {
    const int slice = slice_columns(m.inner, threads);
    round.each((m.inner + slice - 1) / slice, [&](int i) {
        int n0 = i * slice, n1 = std::min(n0 + slice, m.inner), later = n0 + threads * slice;
        const float* next = later + PANEL <= m.inner ? l.gate + int64_t(later) * m.hidden : nullptr;
        gated(R, s.normed, l.gate, l.up, m.packed, m.hidden, n0, n1, s.inner, s.upper, m.inner, s.panel_of(round), next);
    });
    multiply_in_slices(round, threads, s, R, s.inner, l.down, m.packed, m.inner, m.hidden,
              [&](int r, int n, vec v, int count) { add(s.hidden + int64_t(r) * m.hidden + n, v, count); });
}

// Rows are sorted by expert, so each expert's weights are read once; a row adds its experts in the order of their
// index, whatever else is in the batch.
static void sparse_half(const Model& m, const Layer& l, int layer, const Rows& rows, const Scratch& s,
                        Team::Round& round) {
    const int R = rows.count, used = m.experts_used, H = m.hidden, I = m.expert_inner;
    round.each((R + MR - 1) / MR, [&](int tile) {
        int first = tile * MR, last = std::min(first + MR, R);
        float* scores = s.router + int64_t(first) * m.experts;
        product(last - first, s.normed + int64_t(first) * H, H, l.router, false, H, 0, m.experts, s.panel_of(round), nullptr,
                [&](int r, int n, vec v, int count) { put(scores + int64_t(r) * m.experts + n, v, count); });
        for (int r = first; r < last; r++) {
            route(m, s.router + int64_t(r) * m.experts, s.chosen + r * used, s.weight + r * used);
            if (rows.routed)
                for (int i = 0; i < used; i++)
                    rows.routed[(int64_t(r) * m.layers + layer) * used + i] = int16_t(s.chosen[r * used + i]);
        }
    });
    round.each(1, [&](int) {
        int at = 0;
        for (int e = 0; e < m.experts; e++) {
            s.expert_start[e] = at;
            for (int pick = 0; pick < R * used; pick++)
                if (s.chosen[pick] == e) s.by_expert[at++] = pick;
        }
        s.expert_start[m.experts] = at;
    });
    // Gather the rows of each expert; `mixed` is unused until it receives the results of the experts.
    round.each(R * used, [&](int i) {
        std::memcpy(s.mixed + int64_t(i) * H, s.normed + int64_t(s.by_expert[i] / used) * H, sizeof(float) * H);
    });
    const int inner_slices = (I + PANEL - 1) / PANEL, out_slices = (H + PANEL - 1) / PANEL;
    round.each(m.experts * inner_slices, [&](int job) {
        int e = job / inner_slices, n0 = job % inner_slices * PANEL, start = s.expert_start[e];
        const float* w = l.experts_gate_up + int64_t(e) * 2 * I * H;
        gated(s.expert_start[e + 1] - start, s.mixed + int64_t(start) * H, w, w + int64_t(I) * H, false, H, n0,
              std::min(n0 + PANEL, I), s.inner + int64_t(start) * I, s.upper + int64_t(start) * I, I, s.panel_of(round),
              nullptr);
    });
    round.each(m.experts * out_slices, [&](int job) {
        int e = job / out_slices, n0 = job % out_slices * PANEL, start = s.expert_start[e];
        product(s.expert_start[e + 1] - start, s.inner + int64_t(start) * I, I, l.experts_down + int64_t(e) * H * I, false,
                I, n0, std::min(n0 + PANEL, H), s.panel_of(round), nullptr, [&](int i, int n, vec v, int count) {
                    int pick = s.by_expert[start + i];
                    put(s.mixed + int64_t(pick) * H + n, v * s.weight[pick], count);
                });
    });
    round.each(R, [&](int r) {
        for (int e = 0; e < m.experts; e++)
            for (int i = 0; i < used; i++)
                if (s.chosen[r * used + i] == e)
                    for (int n = 0; n < H; n += W) {
                        float* h = s.hidden + int64_t(r) * H + n;
                        store(h, load(h) + load(s.mixed + int64_t(r * used + i) * H + n));
                    }
    });
}

static void all_layers(const Model& m, const Cache& cache, const Rows& rows, const Scratch& s, Team::Round& round,
                       int threads, int context) {
    const int R = rows.count;
    auto hidden = [&](int r) { return s.hidden + int64_t(r) * m.hidden; };
    auto normed = [&](int r) { return s.normed + int64_t(r) * m.hidden; };
    round.each(R, [&](int r) { std::memcpy(hidden(r), m.embed + rows.token[r] * m.hidden, sizeof(float) * m.hidden); });
    for (int i = 0; i < m.layers; i++) {
        const Layer& l = m.layer[i];
        attention_half(m, l, i, cache, rows, s, round, threads, context);
        round.each(R, [&](int r) { rms_norm(hidden(r), l.post_norm, m.eps, m.hidden, normed(r)); });
        if (l.router) sparse_half(m, l, i, rows, s, round);
        else dense_half(m, l, R, s, round, threads);
    }
    round.each(rows.logit_count, [&](int i) { rms_norm(hidden(rows.logit_row[i]), m.norm, m.eps, m.hidden, normed(i)); });
    multiply_in_slices(round, threads, s, rows.logit_count, s.normed, m.head, m.packed, m.hidden, m.vocab,
              [&](int i, int n, vec v, int count) { put(rows.logits + int64_t(i) * m.vocab + n, v, count); });
}

int vector_width() { return W; }

int panel_columns() { return PANEL; }

int64_t scratch_floats(const Model* m, int rows, int threads, int context) {
    return lay_out(*m, rows, threads, context, nullptr, nullptr);
}

void forward(const Model* model, const Cache* cache, const Rows* rows, float* scratch, int threads, int context) {
    Scratch s;
    lay_out(*model, rows->count, threads, context, scratch, &s);
    Team::run(threads, [&](Team::Round& round) {
        all_layers(*model, *cache, *rows, s, round, threads, context);
    });
}

int64_t multiply_floats(int depth, int threads) { return int64_t(threads) * PANEL * depth; }

void multiply(int rows, const float* x, const float* w, int packed, int depth, int columns, float* out, float* scratch,
              int threads) {
    Scratch s;
    s.panels = scratch;
    s.panel = int64_t(PANEL) * depth;
    Team::run(threads, [&](Team::Round& round) {
        multiply_in_slices(round, threads, s, rows, x, w, packed, depth, columns,
                  [&](int r, int n, vec v, int count) { put(out + int64_t(r) * columns + n, v, count); });
    });
}

void paged_attention(const Cache* cache, const Rows* rows, int layer, int heads, int window, float scale, float cap,
                     const float* query, float* scores, int context, float* out, int threads) {
    const int group = heads / cache->kv_heads, width = cache->head_dim, stride = context + 2 * W;
    Team::run(threads, [&](Team::Round& round) {
        round.each(rows->count * cache->kv_heads, [&](int job) {
            int r = job / cache->kv_heads, h = job % cache->kv_heads, last = rows->position[r];
            int first = window > 0 && last + 1 > window ? last + 1 - window : 0;
            int64_t at = (int64_t(r) * heads + h * group) * width;
            attend_any(*cache, layer, rows->table + int64_t(rows->sequence[r]) * rows->table_stride, first, last, h,
                       group, query + at, scale, cap, scores + int64_t(round.thread()) * group * stride, stride, out + at);
        });
    });
}
