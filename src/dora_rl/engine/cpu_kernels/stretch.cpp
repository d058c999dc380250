// Several decode steps in one call, for sequences that need nothing but decoding.
//
// - A row that ends (stop id, length, logits that are not finite) takes no part in later steps; the others continue. The
//   tokens of a row do not depend on the other rows, so the result is the same as that of single steps.
// - The caller guarantees that every row has blocks, and room in its history, for all steps.
// - Rows are computed in groups whose KV fits into a core's cache: a group computes all of its steps before the next group
//   begins, so its KV is read from memory once and not in every step.
#include <unistd.h>

#include <vector>

#include "interface.h"

static bool ends(const Stretch& s, int row) {
    if (s.token[row] < 0 || s.position[row] >= s.last[row]) return true;
    for (int i = 0; i < s.stop_ids; i++)
        if (s.stops[int64_t(row) * s.stop_ids + i] == s.token[row]) return true;
    return false;
}

// Columns of the running rows, as a forward pass and a draw need them.
struct Running {
    std::vector<int64_t> token, drawn;
    std::vector<int32_t> position, sequence, logit_row, top_k;
    std::vector<float> temperature, top_p, min_p, logprob, model_logprob;
    std::vector<uint64_t> seed, trajectory, response_index;

    Running(const Stretch& s, int first, int end) : drawn(end - first), logprob(end - first), model_logprob(end - first) {
        for (int i = first; i < end; i++) {
            const int r = s.chosen[i];
            logit_row.push_back(i - first);
            token.push_back(s.token[r]);
            position.push_back(s.position[r]);
            sequence.push_back(r);
            top_k.push_back(s.top_k[r]);
            temperature.push_back(s.temperature[r]);
            top_p.push_back(s.top_p[r]);
            min_p.push_back(s.min_p[r]);
            seed.push_back(s.seed[r]);
            trajectory.push_back(s.trajectory[r]);
            response_index.push_back(s.response_index[r]);
        }
    }

    void keep(int from, int to) {
        token[to] = token[from];
        position[to] = position[from];
        sequence[to] = sequence[from];
        top_k[to] = top_k[from];
        temperature[to] = temperature[from];
        top_p[to] = top_p[from];
        min_p[to] = min_p[from];
        seed[to] = seed[from];
        trajectory[to] = trajectory[from];
        response_index[to] = response_index[from];
    }
};

static void append(const Stretch& s, int row, int64_t token, float logprob, float model_logprob) {
    int64_t at = int64_t(row) * s.width + s.fill[row]++;
    s.history[at] = token;
    s.logprobs[at] = logprob;
    s.model_logprobs[at] = model_logprob;
    s.token[row] = token;
    s.position[row]++;
    s.response_index[row]++;
}

// Compute the steps of the rows [first, end); return the number of sampled tokens.
static int64_t decode_group(const Model* model, const Cache* cache, const Stretch& s, int first, int end, float* scratch,
                            int threads, int context) {
    Running run(s, first, end);
    int count = int(run.token.size());
    int64_t sampled = 0;
    for (int step = 0; step < s.steps && count; step++) {
        Rows rows{count, s.table_stride, count, run.token.data(), run.position.data(), run.sequence.data(),
                  s.table, run.logit_row.data(), s.logits, nullptr};
        forward(model, cache, &rows, scratch, threads, context);
        Draws draws{count, s.vocab, s.logits, run.temperature.data(), run.top_p.data(), run.min_p.data(),
                    run.top_k.data(), run.seed.data(), run.trajectory.data(), run.response_index.data(), nullptr, nullptr,
                    nullptr, run.drawn.data(), run.logprob.data(), run.model_logprob.data()};
        sample(&draws, threads);
        sampled += count;
        int left = 0;
        for (int i = 0; i < count; i++) {
            int row = run.sequence[i];
            append(s, row, run.drawn[i], run.logprob[i], run.model_logprob[i]);
            if (ends(s, row)) continue;
            run.token[i] = s.token[row];
            run.position[i] = s.position[row];
            run.response_index[i] = s.response_index[row];
            run.keep(i, left++);
        }
        count = left;
    }
    return sampled;
}

int64_t cache_budget() {
    long size = -1;
#if defined(_SC_LEVEL2_CACHE_SIZE)
    size = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
    return (size > 0 ? size : 1 << 20) / 2;
}

int64_t decode(const Model* model, const Cache* cache, const Stretch* stretch, float* scratch, int threads, int context) {
    const Stretch& s = *stretch;
    const int64_t token = int64_t(cache->layers) * 2 * cache->kv_heads * cache->head_dim * sizeof(float);
    int64_t sampled = 0;
    for (int first = 0, end = 0; first < s.rows; first = end) {
        int64_t bytes = 0;
        do bytes += token * s.position[s.chosen[end++]];
        while (end < s.rows && (s.steps == 1 || bytes + token * s.position[s.chosen[end]] <= s.kv_budget));
        sampled += decode_group(model, cache, s, first, end, scratch, threads, context);
    }
    return sampled;
}
