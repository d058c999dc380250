// Sizes and offsets of the structs that Python fills, as the compiler lays them out.
#include <cstddef>
#include <string>

#include "interface.h"

namespace {
// The entry of a struct has no field name and precedes the entries of its fields.
struct Entry {
    const char *type, *field;
    size_t offset, size;
};

#define STRUCT(T) {#T, nullptr, 0, sizeof(T)}
#define FIELD(T, name) {#T, #name, offsetof(T, name), sizeof(T::name)}
const Entry ENTRIES[] = {
#define F(name) FIELD(Layer, name)
    STRUCT(Layer),
    F(input_norm), F(q), F(k), F(v), F(q_bias), F(k_bias), F(v_bias), F(o), F(o_bias), F(q_norm), F(k_norm),
    F(post_norm), F(gate), F(up), F(down), F(router), F(experts_gate_up), F(experts_down),
#undef F
#define F(name) FIELD(Model, name)
    STRUCT(Model),
    F(layers), F(hidden), F(heads), F(kv_heads), F(head_dim), F(inner), F(vocab), F(experts), F(experts_used),
    F(expert_inner), F(norm_topk), F(full_qk_norm), F(packed), F(eps), F(scale), F(embed), F(norm), F(head), F(cos),
    F(sin), F(layer),
#undef F
#define F(name) FIELD(Cache, name)
    STRUCT(Cache),
    F(data), F(block_size), F(layers), F(kv_heads), F(head_dim),
#undef F
#define F(name) FIELD(Rows, name)
    STRUCT(Rows),
    F(count), F(table_stride), F(logit_count), F(token), F(position), F(sequence), F(table), F(logit_row), F(logits),
    F(routed),
#undef F
#define F(name) FIELD(Draws, name)
    STRUCT(Draws),
    F(rows), F(vocab), F(logits), F(temperature), F(top_p), F(min_p), F(top_k), F(seed), F(trajectory), F(position),
    F(bias_start), F(bias_token), F(bias_value), F(token), F(logprob), F(model_logprob),
#undef F
#define F(name) FIELD(Stretch, name)
    STRUCT(Stretch),
    F(rows), F(steps), F(width), F(stop_ids), F(table_stride), F(vocab), F(chosen), F(token), F(position), F(fill),
    F(last), F(response_index), F(stops), F(table), F(history), F(logprobs), F(model_logprobs), F(temperature), F(top_p),
    F(min_p), F(top_k), F(seed), F(trajectory), F(logits), F(kv_budget),
#undef F
};

std::string described() {
    std::string text;
    for (const Entry& one : ENTRIES) {
        if (!text.empty()) text += "\n";
        if (one.field) text += std::string("  ") + one.field + " " + std::to_string(one.offset) + " ";
        else text += std::string(one.type) + " ";
        text += std::to_string(one.size);
    }
    return text;
}
}  // namespace

const char* layout() {
    static const std::string text = described();
    return text.c_str();
}
