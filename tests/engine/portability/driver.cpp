// Checks what the kernels promise, without Python: for compilers and processors that Python does not run on here.
//
// - Products, forward passes, attention, draws and stretches of decode steps give the same bits for a row alone and in
//   any company, whatever the number of threads, the order of blocks and the form of the weights.
// - The numbers are right to rounding, compared with a plain computation in double precision.
// It prints the layout of the structs and a digest of each part's results; the caller compares these with those of other
// builds. It ends with 1 if a check fails, and says which.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "interface.h"
#include "vectors.h"

namespace {
using Floats = std::vector<float>;
int failures = 0;

void check(bool holds, const std::string& what) {
    if (holds) return;
    failures++;
    std::printf("FAILED %s\n", what.c_str());
}

struct Random {
    uint64_t state;
    uint32_t next() {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return uint32_t(state >> 33);
    }
    int below(int n) { return int(next() % uint32_t(n)); }
    float number() { return float(int32_t(next() & 0xFFFF) - 0x8000) * 0x1p-15f; }  // in [-1, 1)
    Floats numbers(size_t count, float scale = 1.0f) {
        Floats v(count);
        for (float& x : v) x = number() * scale;
        return v;
    }
};

struct Digest {
    uint64_t value = 0xcbf29ce484222325u;
    template <class T>
    void take(const T* data, size_t count) {
        const unsigned char* bytes = reinterpret_cast<const unsigned char*>(data);
        for (size_t i = 0; i < count * sizeof(T); i++) value = (value ^ bytes[i]) * 0x100000001b3u;
    }
    void tell(const char* part) const { std::printf("digest %s %016llx\n", part, (unsigned long long)value); }
};

bool same(const float* a, const float* b, size_t count) { return std::memcmp(a, b, count * sizeof(float)) == 0; }

// [n][k] to [n / panel][k][panel], filled up with zeros.
Floats in_panels(const float* w, int columns, int depth) {
    const int panel = panel_columns();
    Floats out(size_t((columns + panel - 1) / panel) * panel * depth);
    for (int n = 0; n < columns; n++)
        for (int k = 0; k < depth; k++) out[(size_t(n / panel) * depth + k) * panel + n % panel] = w[size_t(n) * depth + k];
    return out;
}

Floats product(int rows, const float* x, const Floats& w, bool packed, int depth, int columns, int threads) {
    Floats out(size_t(rows) * columns, NAN), scratch(multiply_floats(depth, threads));
    multiply(rows, x, w.data(), packed, depth, columns, out.data(), scratch.data(), threads);
    return out;
}

void products() {
    constexpr int MOST = 31;
    const int sizes[][2] = {{16, 1}, {48, 40}, {80, 33}, {272, 70}};
    Digest digest;
    for (auto [depth, columns] : sizes) {
        Random random{uint64_t(depth)};
        const Floats x = random.numbers(size_t(MOST) * depth), w = random.numbers(size_t(columns) * depth);
        const Floats packed = in_panels(w.data(), columns, depth);
        Floats alone;
        for (int m = 0; m < MOST; m++) {
            Floats row = product(1, &x[size_t(m) * depth], w, false, depth, columns, 1);
            alone.insert(alone.end(), row.begin(), row.end());
        }
        double worst = 0;
        for (int m = 0; m < MOST; m++)
            for (int n = 0; n < columns; n++) {
                double exact = 0;
                for (int k = 0; k < depth; k++) exact += double(x[size_t(m) * depth + k]) * w[size_t(n) * depth + k];
                worst = std::max(worst, std::fabs(exact - alone[size_t(m) * columns + n]));
            }
        check(worst < 1e-6 * depth, "a product is off by " + std::to_string(worst));
        for (int rows = 1; rows <= MOST; rows++)
            for (int kind = 0; kind < 4; kind++) {
                Floats out = product(rows, x.data(), kind & 1 ? packed : w, kind & 1, depth, columns, 1 + kind / 2);
                check(same(out.data(), alone.data(), out.size()),
                      "product of " + std::to_string(rows) + " rows, depth " + std::to_string(depth) + ", " +
                          (kind & 1 ? "in panels, " : "") + std::to_string(1 + kind / 2) + " threads");
            }
        digest.take(alone.data(), alone.size());
    }
    digest.tell("product");
}

void functions() {
    double worst_exp = 0, worst_tanh = 0;
    auto units = [](float got, double exact) {
        float near = std::fabs(float(exact));
        return std::fabs(got - exact) / (std::nextafter(near, INFINITY) - near);
    };
    Digest digest;
    for (float x = -86.5f; x < 88.0f; x += 0.00931f) {
        float e = exp(x), t = tanh(all(x * 0.11f))[0];
        worst_exp = std::max(worst_exp, units(e, std::exp(double(x))));
        worst_tanh = std::max(worst_tanh, units(t, std::tanh(double(x * 0.11f))));
        digest.take(&e, 1);
        digest.take(&t, 1);
    }
    check(worst_exp <= 2, "exp is off by " + std::to_string(worst_exp) + " units in the last place");
    check(worst_tanh <= 2, "tanh is off by " + std::to_string(worst_tanh) + " units in the last place");
    check(exp(-100.0f) == 0.0f && exp(0.0f) == 1.0f && std::isnan(exp(NAN)), "exp at its edges");
    digest.tell("functions");
}

// A random decoder, small, with sequences in a paged cache.
struct Decoder {
    static constexpr int LAYERS = 2, HIDDEN = 64, HEADS = 4, KV = 2, WIDTH = 16, INNER = 96, VOCAB = 90, EXPERTS = 6;
    static constexpr int USED = 2, EXPERT_INNER = 32, CONTEXT = 64, BLOCK = 4, SEQUENCES = 5, STRIDE = CONTEXT / BLOCK;
    std::vector<Floats> kept;
    std::vector<Layer> layers;
    Model model{};
    std::vector<std::vector<int64_t>> tokens;

    const float* weight(Random& random, size_t count, float scale) {
        kept.push_back(random.numbers(count, scale));
        return kept.back().data();
    }
    const float* matrix(Random& random, int columns, int depth, bool packed) {
        kept.push_back(random.numbers(size_t(columns) * depth, 0.3f));
        if (packed) kept.back() = in_panels(kept.back().data(), columns, depth);
        return kept.back().data();
    }

    Decoder(bool sparse, bool packed) {
        Random random{7};
        const int q = HEADS * WIDTH, kv = KV * WIDTH;
        kept.reserve(200);
        for (int i = 0; i < LAYERS; i++) {
            Layer l{};
            l.input_norm = weight(random, HIDDEN, 1);
            l.post_norm = weight(random, HIDDEN, 1);
            l.q = matrix(random, q, HIDDEN, packed), l.k = matrix(random, kv, HIDDEN, packed);
            l.v = matrix(random, kv, HIDDEN, packed), l.o = matrix(random, HIDDEN, q, packed);
            l.q_bias = weight(random, q, 0.1f), l.k_bias = weight(random, kv, 0.1f), l.v_bias = weight(random, kv, 0.1f);
            l.q_norm = weight(random, WIDTH, 1), l.k_norm = weight(random, WIDTH, 1);
            if (sparse) {
                l.router = matrix(random, EXPERTS, HIDDEN, false);
                l.experts_gate_up = weight(random, size_t(EXPERTS) * 2 * EXPERT_INNER * HIDDEN, 0.3f);
                l.experts_down = weight(random, size_t(EXPERTS) * HIDDEN * EXPERT_INNER, 0.3f);
            } else {
                l.gate = matrix(random, INNER, HIDDEN, packed), l.up = matrix(random, INNER, HIDDEN, packed);
                l.down = matrix(random, HIDDEN, INNER, packed);
            }
            layers.push_back(l);
        }
        model.layers = LAYERS, model.hidden = HIDDEN, model.heads = HEADS, model.kv_heads = KV, model.head_dim = WIDTH;
        model.inner = INNER, model.vocab = VOCAB, model.packed = packed, model.eps = 1e-5f, model.scale = 0.25f;
        if (sparse) model.experts = EXPERTS, model.experts_used = USED, model.expert_inner = EXPERT_INNER, model.norm_topk = 1;
        model.embed = weight(random, size_t(VOCAB) * HIDDEN, 1), model.norm = weight(random, HIDDEN, 1);
        model.head = matrix(random, VOCAB, HIDDEN, packed);
        model.cos = weight(random, size_t(CONTEXT) * WIDTH, 1), model.sin = weight(random, size_t(CONTEXT) * WIDTH, 1);
        model.layer = layers.data();
        for (int s = 0; s < SEQUENCES; s++) {
            tokens.emplace_back();
            for (int t = 0; t < 1 + 9 * s; t++) tokens.back().push_back(random.below(VOCAB));
        }
    }
};

// One cache of a decoder, with its blocks in an order of its own.
struct Serving {
    const Decoder& d;
    Floats data, scratch;
    std::vector<int32_t> table;
    Cache cache{};
    int threads;

    Serving(const Decoder& decoder, int threads, uint64_t order) : d(decoder), threads(threads) {
        const int blocks = d.SEQUENCES * d.STRIDE;
        data.assign(size_t(blocks) * d.LAYERS * 2 * d.BLOCK * d.KV * d.WIDTH, NAN);
        for (int i = 0; i < blocks; i++) table.push_back(i);
        Random random{order};
        for (int i = blocks - 1; i > 0 && order; i--) std::swap(table[i], table[random.below(i + 1)]);
        cache = Cache{data.data(), d.BLOCK, d.LAYERS, d.KV, d.WIDTH};
        scratch.resize(scratch_floats(&d.model, 128, threads, d.CONTEXT));
    }

    // Logits of each of these tokens; `where` are (sequence, position).
    Floats compute(const std::vector<std::pair<int, int>>& where) {
        std::vector<int64_t> token;
        std::vector<int32_t> position, sequence, logit_row;
        for (auto [s, t] : where) {
            logit_row.push_back(int32_t(token.size()));
            token.push_back(d.tokens[s][t]), position.push_back(t), sequence.push_back(s);
        }
        const int count = int(where.size());
        Floats logits(size_t(count) * d.VOCAB, NAN);
        Rows rows{count, d.STRIDE, count, token.data(), position.data(), sequence.data(), table.data(), logit_row.data(),
                  logits.data(), nullptr};
        forward(&d.model, &cache, &rows, scratch.data(), threads, d.CONTEXT);
        return logits;
    }
};

void forwards(bool sparse) {
    Decoder plain(sparse, false), packed(sparse, true);
    std::vector<std::vector<Floats>> alone(Decoder::SEQUENCES);
    Digest digest;
    for (int s = 0; s < Decoder::SEQUENCES; s++) {
        Serving serving(plain, 1, 0);
        for (int t = 0; t < int(plain.tokens[s].size()); t++) {
            alone[s].push_back(serving.compute({{s, t}}));
            for (float x : alone[s].back()) check(std::isfinite(x), "a logit is not finite");
            digest.take(alone[s].back().data(), Decoder::VOCAB);
        }
    }
    for (int way = 0; way < 14; way++) {
        Random random{uint64_t(way) + 100};
        Serving serving(way % 2 ? packed : plain, 1 + way % 3, uint64_t(way));
        std::vector<int> done(Decoder::SEQUENCES);
        for (bool left = true; left;) {
            left = false;
            std::vector<std::pair<int, int>> where;
            for (int s = 0; s < Decoder::SEQUENCES; s++) {
                const int all = int(plain.tokens[s].size());
                const int size = std::min(all - done[s], way < 2 ? all : random.below(1 + way));
                for (int i = 0; i < size; i++) where.emplace_back(s, done[s]++);
                left |= done[s] < all;
            }
            if (where.empty()) continue;
            const Floats logits = serving.compute(where);
            for (size_t i = 0; i < where.size(); i++)
                check(same(&logits[i * Decoder::VOCAB], alone[where[i].first][where[i].second].data(), Decoder::VOCAB),
                      std::string(sparse ? "sparse" : "dense") + " forward pass " + std::to_string(way) + " with " +
                          std::to_string(where.size()) + " rows");
        }
    }
    digest.tell(sparse ? "sparse" : "dense");
}

void attentions() {
    constexpr int ROWS = 9, HEADS = 4, KV = 2, WIDTH = 32, CONTEXT = 80;
    Random random{3};
    const Floats query = random.numbers(size_t(ROWS) * HEADS * WIDTH, 3), kv = random.numbers(size_t(CONTEXT) * 2 * KV * WIDTH, 3);
    Digest digest;
    Floats first_blocks;
    for (int block : {4, 16}) {  // the size of a block changes nothing either
        const int stride = CONTEXT / block;
        Floats data(size_t(stride) * 2 * block * KV * WIDTH);
        std::vector<int32_t> table(stride), sequence(ROWS, 0), position;
        for (int i = 0; i < stride; i++) table[i] = stride - 1 - i;
        Cache cache{data.data(), block, 1, KV, WIDTH};
        for (int t = 0; t < CONTEXT; t++)
            for (int value = 0; value < 2; value++)
                std::memcpy(cache.at(table[t / block], 0, value) + (t % block) * KV * WIDTH,
                            &kv[(size_t(t) * 2 + value) * KV * WIDTH], KV * WIDTH * sizeof(float));
        for (int r = 0; r < ROWS; r++) position.push_back(r * 9 + r % 3);
        Floats results;
        for (float cap : {0.0f, 5.0f})
            for (int window : {0, 11}) {
                auto run = [&](int first, int count, int threads) {
                    Rows rows{count, stride, 0, nullptr, &position[first], sequence.data(), table.data(), nullptr, nullptr, nullptr};
                    Floats scores(size_t(threads) * (HEADS / KV) * (CONTEXT + 64), NAN), out(size_t(count) * HEADS * WIDTH);
                    paged_attention(&cache, &rows, 0, HEADS, window, 0.2f, cap, &query[size_t(first) * HEADS * WIDTH],
                                    scores.data(), CONTEXT, out.data(), threads);
                    return out;
                };
                Floats together = run(0, ROWS, 3);
                for (int r = 0; r < ROWS; r++) {
                    Floats alone = run(r, 1, 1);
                    check(same(alone.data(), &together[size_t(r) * HEADS * WIDTH], alone.size()), "attention of a row");
                    const int last = position[r], first = window && last + 1 > window ? last + 1 - window : 0;
                    for (int h = 0; h < HEADS; h++) {
                        std::vector<double> exact(WIDTH);
                        double total = 0;
                        for (int t = first; t <= last; t++) {
                            double s = 0;
                            for (int i = 0; i < WIDTH; i++)
                                s += double(query[(size_t(r) * HEADS + h) * WIDTH + i]) * kv[(size_t(t) * 2 * KV + h / 2) * WIDTH + i];
                            s *= 0.2f;
                            double e = std::exp(cap > 0 ? cap * std::tanh(s / cap) : s);
                            total += e;
                            for (int i = 0; i < WIDTH; i++) exact[i] += e * kv[((size_t(t) * 2 + 1) * KV + h / 2) * WIDTH + i];
                        }
                        for (int i = 0; i < WIDTH; i++)
                            check(std::fabs(exact[i] / total - alone[h * WIDTH + i]) < 3e-4, "attention is wrong");
                    }
                }
                results.insert(results.end(), together.begin(), together.end());
            }
        if (first_blocks.empty()) first_blocks = results;
        check(same(first_blocks.data(), results.data(), results.size()), "attention with blocks of another size");
        digest.take(results.data(), results.size());
    }
    digest.tell("attention");
}

void samples() {
    constexpr int ROWS = 60, VOCAB = 333;
    Random random{9};
    const Floats logits = random.numbers(size_t(ROWS) * VOCAB, 6);
    Floats temperature, top_p, min_p, bias_value;
    std::vector<int32_t> top_k, bias_start{0}, bias_token;
    std::vector<uint64_t> seed, trajectory, position;
    for (int r = 0; r < ROWS; r++) {
        temperature.push_back(r % 7 == 6 ? 0.0f : 0.5f + 0.25f * float(r % 5));
        top_p.push_back(r % 3 == 1 ? 0.8f : 1.0f), min_p.push_back(r % 4 == 2 ? 0.05f : 0.0f);
        top_k.push_back(r % 5 == 3 ? 12 : 0);
        seed.push_back(5), trajectory.push_back(r), position.push_back(3 * r);
        if (r % 2) bias_token.push_back(r), bias_value.push_back(2.5f);
        bias_start.push_back(int32_t(bias_token.size()));
    }
    struct Drawn {
        std::vector<int64_t> token;
        Floats logprob, model_logprob;
    };
    auto run = [&](int first, int count, int threads) {
        Drawn out{std::vector<int64_t>(count), Floats(count), Floats(count)};
        Draws draws{count, VOCAB, &logits[size_t(first) * VOCAB], &temperature[first], &top_p[first], &min_p[first],
                    &top_k[first], &seed[first], &trajectory[first], &position[first], &bias_start[first],
                    bias_token.data(), bias_value.data(), out.token.data(), out.logprob.data(), out.model_logprob.data()};
        sample(&draws, threads);
        return out;
    };
    Digest digest;
    const Drawn together = run(0, ROWS, 3);
    for (int r = 0; r < ROWS; r++) {
        const Drawn alone = run(r, 1, 1);
        check(alone.token[0] == together.token[r] && same(alone.logprob.data(), &together.logprob[r], 1) &&
                  same(alone.model_logprob.data(), &together.model_logprob[r], 1),
              "draw of row " + std::to_string(r));
        check(alone.token[0] >= 0 && alone.token[0] < VOCAB && alone.logprob[0] <= 0, "a draw is none");
        double total = 0, scale = temperature[r] > 0 ? 1 / double(temperature[r]) : 1;
        for (int i = 0; i < VOCAB; i++) total += std::exp(scale * logits[size_t(r) * VOCAB + i]);
        const double exact = scale * logits[size_t(r) * VOCAB + alone.token[0]] - std::log(total);
        check(std::fabs(exact - alone.model_logprob[0]) < 2e-5, "a log-prob is wrong");
    }
    digest.take(together.token.data(), ROWS);
    digest.take(together.logprob.data(), ROWS);
    digest.take(together.model_logprob.data(), ROWS);
    digest.tell("sample");
}

// What each sequence says in STEPS steps after its prompt.
struct Spoken {
    static constexpr int STEPS = 14;
    std::vector<int64_t> history;
    Floats logprobs;
};

Spoken speak(const Decoder& d, std::vector<int32_t> chosen, int steps, int threads, int64_t near) {
    constexpr int N = Decoder::SEQUENCES, STEPS = Spoken::STEPS;
    Serving serving(d, threads, uint64_t(threads));
    std::vector<std::pair<int, int>> prompts;
    std::vector<int64_t> token(N), stops(N, 3);
    std::vector<int32_t> position(N), fill(N), last(N, Decoder::CONTEXT - 1), top_k(N);
    std::vector<uint64_t> place(N), seed(N, 5), trajectory(N);
    for (int s = 0; s < N; s++) {
        const int length = int(d.tokens[s].size());
        for (int t = 0; t + 1 < length; t++) prompts.emplace_back(s, t);
        token[s] = d.tokens[s].back(), position[s] = length - 1, trajectory[s] = s;
    }
    serving.compute(prompts);
    Spoken out{std::vector<int64_t>(N * STEPS, -1), Floats(N * STEPS)};
    Floats model_logprobs(N * STEPS), temperature(N, 0.9f), top_p(N, 0.95f), min_p(N), logits(size_t(N) * d.VOCAB);
    for (int done = 0; done < STEPS && !chosen.empty(); done += steps) {
        Stretch stretch{int32_t(chosen.size()), std::min(steps, STEPS - done), STEPS, 1, d.STRIDE, d.VOCAB, chosen.data(),
                        token.data(), position.data(), fill.data(), last.data(), place.data(), stops.data(),
                        serving.table.data(), out.history.data(), out.logprobs.data(), model_logprobs.data(),
                        temperature.data(), top_p.data(), min_p.data(), top_k.data(), seed.data(), trajectory.data(),
                        logits.data(), near};
        decode(&d.model, &serving.cache, &stretch, serving.scratch.data(), threads, d.CONTEXT);
        std::vector<int32_t> going;
        for (int32_t s : chosen)
            if (token[s] != stops[s] && position[s] < last[s]) going.push_back(s);
        chosen = going;
    }
    return out;
}

void stretches() {
    constexpr int STEPS = Spoken::STEPS;
    Decoder plain(false, false), packed(false, true);
    Spoken alone{std::vector<int64_t>(), Floats()};
    for (int s = 0; s < Decoder::SEQUENCES; s++) {
        Spoken one = speak(plain, {s}, 1, 1, 1);
        alone.history.insert(alone.history.end(), &one.history[s * STEPS], &one.history[s * STEPS] + STEPS);
        alone.logprobs.insert(alone.logprobs.end(), &one.logprobs[s * STEPS], &one.logprobs[s * STEPS] + STEPS);
    }
    for (int steps : {1, 5, STEPS})
        for (int64_t near : {int64_t(1), int64_t(6000), int64_t(1) << 40}) {
            Spoken all = speak(steps == 5 ? packed : plain, {4, 0, 3, 1, 2}, steps, 1 + steps % 3, near);
            check(all.history == alone.history && same(all.logprobs.data(), alone.logprobs.data(), alone.logprobs.size()),
                  "a stretch of " + std::to_string(steps) + " steps with " + std::to_string(near) + " bytes near");
        }
    Digest digest;
    digest.take(alone.history.data(), alone.history.size());
    digest.take(alone.logprobs.data(), alone.logprobs.size());
    digest.tell("stretch");
}
}  // namespace

int main() {
    std::printf("vectors of %d floats, %s multiply-add\n", vector_width(), FUSED ? "fused" : "separate");
    std::printf("%s\n", layout());
    functions();
    products();
    forwards(false);
    forwards(true);
    attentions();
    samples();
    stretches();
    std::printf("%d failures\n", failures);
    return failures ? 1 : 0;
}
