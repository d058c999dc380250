// Sampling, one row of logits at a time. A row's random number is a function of (seed, trajectory, position), so this
// file has no state.
//
// Truncation is a threshold on probabilities: top-k, top-p and min-p each give one, the highest applies, and ties are
// kept. The draw walks the tokens in the order of their ids.
#include <algorithm>
#include <cmath>
#include <vector>

#include "interface.h"
#include "team.h"
#include "vectors.h"

// Philox4x32 with ten rounds, keyed by the seed, counting (position, trajectory); 53 of its bits as a number in [0, 1).
static double uniform(uint64_t seed, uint64_t trajectory, uint64_t position) {
    uint32_t c[4] = {uint32_t(position), uint32_t(position >> 32), uint32_t(trajectory), uint32_t(trajectory >> 32)};
    uint32_t k[2] = {uint32_t(seed), uint32_t(seed >> 32)};
    for (int round = 0; round < 10; round++) {
        uint64_t a = uint64_t(0xD2511F53u) * c[0], b = uint64_t(0xCD9E8D57u) * c[2];
        uint32_t next[4] = {uint32_t(b >> 32) ^ c[1] ^ k[0], uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ k[1], uint32_t(a)};
        for (int i = 0; i < 4; i++) c[i] = next[i];
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
    return double((uint64_t(c[0]) << 32 | c[1]) >> 11) * 0x1p-53;
}

static float highest(const float* x, int n) {
    float m = -INFINITY;
    int i = 0;
    if (n >= W) {
        vec top = load(x);
        for (i = W; i + W <= n; i += W) top = max(top, load(x + i));
        m = max(top);
    }
    for (; i < n; i++) m = x[i] > m ? x[i] : m;
    return m;
}

// out[i] = exp((x[i] - most) * scale); returns their sum. `out` has room for a complete last vector.
static double exponentials(const float* x, int n, float most, float scale, float* out) {
    double total = 0;
    for (int i = 0; i < n; i += 256) {
        int end = i + 256 < n ? i + 256 : n, j = i;
        vec part = {};
        for (; j + W <= end; j += W) {
            vec e = exp((load(x + j) - most) * scale);
            store(out + j, e);
            part += e;
        }
        total += sum(part);
        for (; j < end; j++) {
            out[j] = exp(all((x[j] - most) * scale))[0];
            total += out[j];
        }
    }
    return total;
}

static float threshold(const Draws& d, int r, const float* p, double total, std::vector<float>& some) {
    const int n = d.vocab;
    float cut = d.min_p[r] > 0 ? d.min_p[r] : 0.0f;  // the likeliest token has p = 1
    if (d.top_k[r] > 0 && d.top_k[r] < n) {
        some.assign(p, p + n);
        std::nth_element(some.begin(), some.begin() + (d.top_k[r] - 1), some.end(), std::greater<float>());
        float kth = some[d.top_k[r] - 1];
        total = 0;
        for (int i = 0; i < n; i++) total += p[i] >= kth ? p[i] : 0.0f;
        cut = std::max(cut, kth);
    }
    if (d.top_p[r] < 1.0f) {
        // All tokens below this bound together have less than 1 - top_p of the mass, so none of them is in the nucleus.
        float bound = std::max(cut, float((1.0 - d.top_p[r]) * total / n));
        some.clear();
        for (int i = 0; i < n; i++)
            if (p[i] >= bound) some.push_back(p[i]);
        std::sort(some.begin(), some.end(), std::greater<float>());
        double mass = 0, wanted = d.top_p[r] * total;
        for (float q : some) {
            mass += q;
            if (mass >= wanted) {
                cut = std::max(cut, q);
                break;
            }
        }
    }
    return cut;
}

constexpr int CHUNK = 256;  // tokens whose weights are summed at once, so that a draw walks few tokens one by one

// The weight of the kept tokens in each chunk; returns the weight of all kept tokens.
static double weigh(const float* p, int n, float cut, std::vector<double>& chunks) {
    double total = 0;
    chunks.clear();
    for (int i = 0; i < n; i += CHUNK) {
        int end = i + CHUNK < n ? i + CHUNK : n, j = i;
        vec part = {};
        for (; j + W <= end; j += W) {
            vec v = load(p + j);
            part += v >= all(cut) ? v : vec{};
        }
        double weight = sum(part);
        for (; j < end; j++) weight += p[j] >= cut ? p[j] : 0.0f;
        chunks.push_back(weight);
        total += weight;
    }
    return total;
}

static int draw(const float* p, int n, float cut, double uniform, double* mass, std::vector<double>& chunks) {
    *mass = weigh(p, n, cut, chunks);
    double goal = uniform * *mass, before = 0;
    int last = -1;
    for (int i = 0; i < n; i += CHUNK) {
        int end = i + CHUNK < n ? i + CHUNK : n;
        double part = chunks[i / CHUNK];
        if (before + part <= goal && end < n) {
            before += part;
            continue;
        }
        for (int j = i; j < end; j++) {
            if (p[j] < cut || p[j] == 0.0f) continue;
            last = j;
            before += p[j];
            if (before > goal) return j;
        }
    }
    if (last >= 0) return last;
    return int(std::max_element(p, p + n) - p);
}

static void sample_row(const Draws& d, int r, std::vector<float>& p, std::vector<float>& biased, std::vector<float>& some,
                std::vector<double>& chunks) {
    const int n = d.vocab;
    const float* logits = d.logits + int64_t(r) * n;
    const float T = d.temperature[r], scale = T > 0 ? 1.0f / T : 1.0f;
    float most = highest(logits, n);
    double total = exponentials(logits, n, most, scale, p.data());
    d.token[r] = -1;
    d.logprob[r] = d.model_logprob[r] = NAN;
    if (!std::isfinite(most) || !std::isfinite(total)) return;
    const double model_log_total = std::log(total);
    const float* used = logits;
    float used_most = most;
    if (d.bias_start && d.bias_start[r + 1] > d.bias_start[r]) {
        biased.assign(logits, logits + n);
        for (int i = d.bias_start[r]; i < d.bias_start[r + 1]; i++) biased[d.bias_token[i]] += d.bias_value[i];
        used = biased.data();
        used_most = highest(used, n);
        if (!std::isfinite(used_most)) return;
        total = exponentials(used, n, used_most, scale, p.data());
    }
    int token;
    if (T > 0) {
        double mass;
        token = draw(p.data(), n, threshold(d, r, p.data(), total, some),
                     uniform(d.seed[r], d.trajectory[r], d.position[r]), &mass, chunks);
        d.logprob[r] = float((double(used[token]) - used_most) * scale - std::log(mass));
    } else {
        token = int(std::max_element(used, used + n) - used);
        d.logprob[r] = 0.0f;
    }
    d.model_logprob[r] = float((double(logits[token]) - most) * scale - model_log_total);
    d.token[r] = token;
}

void sample(const Draws* draws, int threads) {
    Team::run(threads, [&](Team::Round& round) {
        std::vector<float> p(draws->vocab + W), biased, some;
        std::vector<double> chunks;
        round.each(draws->rows, [&](int r) { sample_row(*draws, r, p, biased, some, chunks); });
    });
}
