// The structs that Python fills and the functions that it calls. binding.py declares the same for ctypes; `layout` lets it
// compare the two.
#pragma once
#include <cstdint>

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Weights of one decoder layer; a null pointer is a tensor that the layer does not have.
struct Layer {
    const float *input_norm, *q, *k, *v, *q_bias, *k_bias, *v_bias, *o, *o_bias, *q_norm, *k_norm, *post_norm;
    const float *gate, *up, *down;                      // dense
    const float *router, *experts_gate_up, *experts_down;  // mixture of experts; `router` is null in a dense layer
};

// Dimensions and weights of a decoder.
struct Model {
    int32_t layers, hidden, heads, kv_heads, head_dim, inner, vocab;
    int32_t experts, experts_used, expert_inner, norm_topk, full_qk_norm;
    int32_t packed;  // whether the dense matrices and the head are packed into panels (see product.h)
    float eps, scale;
    const float *embed, *norm, *head, *cos, *sin;
    const Layer* layer;
};

// The memory of the KV blocks.
struct Cache {
    float* data;
    int32_t block_size, layers, kv_heads, head_dim;
    float* at(int32_t block, int layer, int value) const {
        int64_t plane = int64_t(block_size) * kv_heads * head_dim;
        return data + ((int64_t(block) * layers + layer) * 2 + value) * plane;
    }
};

// The tokens of one forward pass.
struct Rows {
    int32_t count, table_stride, logit_count;
    const int64_t* token;      // [count]
    const int32_t* position;   // [count]
    const int32_t* sequence;   // [count], row of `table`
    const int32_t* table;      // [sequences][table_stride] block ids
    const int32_t* logit_row;  // [logit_count] rows that get logits
    float* logits;             // [logit_count][vocab]
    int16_t* routed;           // [count][layers][experts_used], or null
};

// The rows of one sampling pass.
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

// Sequences that decode several steps in one call.
struct Stretch {
    int32_t rows, steps, width, stop_ids, table_stride, vocab;
    const int32_t* chosen;   // [rows] the rows that decode; the other arrays have further rows
    int64_t* token;          // [rows] the token that is left to compute
    int32_t *position, *fill;  // [rows]
    const int32_t* last;     // [rows] position of the last token that the length limit allows
    uint64_t* response_index;         // [rows] index in the response of the next token
    const int64_t* stops;    // [rows][stop_ids]
    const int32_t* table;    // [rows][table_stride]
    int64_t* history;        // [rows][width]
    float *logprobs, *model_logprobs;  // [rows][width]
    const float *temperature, *top_p, *min_p;
    const int32_t* top_k;
    const uint64_t *seed, *trajectory;
    float* logits;           // [rows][vocab]
    int64_t kv_budget;            // bytes of KV of a group of rows
};

// Floats in a vector, and columns in a panel (see product.h).
EXPORTED int vector_width();
EXPORTED int panel_columns();

// One line "struct size" for each of the structs above, followed by one line "  field offset size" for each of its fields.
EXPORTED const char* layout();

// Floats that `forward` and `decode` need as scratch.
EXPORTED int64_t scratch_floats(const Model* model, int rows, int threads, int context);

EXPORTED void forward(const Model* model, const Cache* cache, const Rows* rows, float* scratch, int threads, int context);

// Returns the number of sampled tokens.
EXPORTED int64_t decode(const Model* model, const Cache* cache, const Stretch* stretch, float* scratch, int threads,
                        int context);

EXPORTED void sample(const Draws* draws, int threads);

// Half of a core's second-level cache: the budget for the weights of a small model, and for the KV of a group of rows.
EXPORTED int64_t cache_budget();

// One product, out[m][n] = x[m] . w[n], as a forward pass computes it, for tests and measurements. `scratch` has
// multiply_floats(depth, threads) floats.
EXPORTED int64_t multiply_floats(int depth, int threads);
EXPORTED void multiply(int rows, const float* x, const float* w, int packed, int depth, int columns, float* out,
                       float* scratch, int threads);

// Attention for models whose other layers run in torch. query and out: [rows][heads][head_dim].
EXPORTED void paged_attention(const Cache* cache, const Rows* rows, int layer, int heads, int window, float scale,
                              float cap, const float* query, float* scores, int context, float* out, int threads);
