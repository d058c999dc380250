// What one sampling pass is given.
#pragma once
#include <cstdint>

struct Draws {
    int32_t rows, vocab;
    const float* logits;        // [rows][vocab]
    const float *temperature, *top_p, *min_p;  // [rows]; temperature 0 is greedy
    const int32_t* top_k;       // [rows]; 0 is no limit
    const uint64_t *seed, *trajectory, *position;  // [rows], the key of the row's random number
    const int32_t* bias_start;  // [rows + 1] into the two below, or null
    const int32_t* bias_token;
    const float* bias_value;
    int64_t* token;             // [rows]; -1 where the logits are not finite
    float *logprob, *model_logprob;
};

extern "C" void sample(const Draws* draws, int threads);
