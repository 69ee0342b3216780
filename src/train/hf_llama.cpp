#include "train/hf_llama.h"

#include <c10/util/Exception.h>

#include <array>
#include <string_view>

namespace fsdp2::train {
namespace {

using Json = nlohmann::ordered_json;

using Renamed = std::pair<std::string_view, std::string_view>;
constexpr std::array<Renamed, 3> kOutside = {
    {{"tok_embeddings.weight", "model.embed_tokens.weight"},
     {"norm.weight", "model.norm.weight"},
     {"output.weight", "lm_head.weight"}}};
constexpr std::array<Renamed, 9> kInBlock = {
    {{"attention_norm.weight", "input_layernorm.weight"},
     {"attention.wq.weight", "self_attn.q_proj.weight"},
     {"attention.wk.weight", "self_attn.k_proj.weight"},
     {"attention.wv.weight", "self_attn.v_proj.weight"},
     {"attention.wo.weight", "self_attn.o_proj.weight"},
     {"ffn_norm.weight", "post_attention_layernorm.weight"},
     {"feed_forward.w1.weight", "mlp.gate_proj.weight"},
     {"feed_forward.w2.weight", "mlp.down_proj.weight"},
     {"feed_forward.w3.weight", "mlp.up_proj.weight"}}};

template <class Names>
std::string_view renamed(const Names& names, std::string_view name) {
  for (const auto& [ours, theirs] : names) {
    if (ours == name) return theirs;
  }
  TORCH_CHECK(false, "Llama has no parameter called ", name);
}

/// Null counts as absent, as in transformers.
const Json* find(const Json& fields, const char* name) {
  const auto place = fields.find(name);
  return place == fields.end() || place->is_null() ? nullptr : &*place;
}

template <class T>
T read(const Json& fields, const char* name, const std::optional<T>& absent = std::nullopt) {
  const Json* value = find(fields, name);
  if (value == nullptr) {
    TORCH_CHECK_VALUE(absent.has_value(), name, " is missing");
    return *absent;
  }
  const bool fits = std::is_same_v<T, bool>          ? value->is_boolean()
                    : std::is_same_v<T, std::string> ? value->is_string()
                    : std::is_same_v<T, int64_t>     ? value->is_number_integer()
                                                     : value->is_number();
  TORCH_CHECK_VALUE(fits, name, " is ", value->dump());
  return value->get<T>();
}

/// What each of these fields must be if it is there.
void check_fixed(const Json& fields) {
  TORCH_CHECK_VALUE(find(fields, "model_type") != nullptr,
                    "model_type is missing: this is not a model's folder as Hugging Face has it");
  const std::array<std::pair<const char*, Json>, 8> fixed = {
      {{"model_type", "llama"},
       {"architectures", Json::array({"LlamaForCausalLM"})},
       {"hidden_act", "silu"},
       {"attention_bias", false},
       {"mlp_bias", false},
       {"attention_dropout", 0},
       {"partial_rotary_factor", 1},
       {"quantization_config", nullptr}}};
  for (const auto& [name, wanted] : fixed) {
    const Json* value = find(fields, name);
    if (value == nullptr || *value == wanted) continue;
    TORCH_CHECK_VALUE(!wanted.is_null(), name, " is set; weights must be plain here");
    TORCH_CHECK_VALUE(false, name, " is ", value->dump(), "; the decoder here does ", wanted.dump(),
                      " only");
  }
}

RotaryOptions rotary_of(const Json& fields) {
  // transformers 5 has all of it in rope_parameters, older ones the base outside of rope_scaling.
  const char* place =
      find(fields, "rope_parameters") != nullptr ? "rope_parameters" : "rope_scaling";
  const Json* given = find(fields, place);
  const Json rope = given != nullptr ? *given : Json::object();
  TORCH_CHECK_VALUE(rope.is_object(), place, " is ", rope.dump());
  TORCH_CHECK_VALUE(read<double>(rope, "partial_rotary_factor", 1.0) == 1, place,
                    ": partial_rotary_factor must be 1 here");
  RotaryOptions options;
  options.theta = read<double>(rope, "rope_theta", read<double>(fields, "rope_theta", 10000.0));
  const auto type =
      read<std::string>(rope, "rope_type", read<std::string>(rope, "type", "default"));
  if (type == "llama3") {
    options.scaling = {read<double>(rope, "factor"), read<double>(rope, "low_freq_factor"),
                       read<double>(rope, "high_freq_factor"),
                       read<int64_t>(rope, "original_max_position_embeddings")};
  } else {
    TORCH_CHECK_VALUE(type == "default", place, ": rope_type is \"", type,
                      "\"; the decoder here does \"default\" and \"llama3\" only");
  }
  return options;
}

}  // namespace

std::string hf_name(const std::string& name) {
  constexpr std::string_view blocks = "layers.";
  if (!name.starts_with(blocks)) return std::string(renamed(kOutside, name));
  const size_t end = name.find('.', blocks.size()) + 1;
  return "model." + name.substr(0, end) +
         std::string(renamed(kInBlock, std::string_view(name).substr(end)));
}

bool hf_passes_over(const LlamaConfig& config, const std::string& name) {
  return name.ends_with(".rotary_emb.inv_freq") || (config.tied && name == "lm_head.weight");
}

LlamaConfig llama_of_hf(const Json& fields) {
  TORCH_CHECK_VALUE(fields.is_object(), "this is no JSON object");
  check_fixed(fields);
  LlamaConfig config;
  config.dim = read<int64_t>(fields, "hidden_size");
  config.layers = read<int64_t>(fields, "num_hidden_layers");
  config.heads = read<int64_t>(fields, "num_attention_heads");
  config.kv_heads = read<int64_t>(fields, "num_key_value_heads", config.heads);
  config.ffn = read<int64_t>(fields, "intermediate_size");
  config.vocab = read<int64_t>(fields, "vocab_size");
  config.seq = read<int64_t>(fields, "max_position_embeddings", 2048);
  config.tied = read<bool>(fields, "tie_word_embeddings", false);
  config.norm_eps = read<double>(fields, "rms_norm_eps", 1e-6);
  config.rotary = rotary_of(fields);
  config = resolve(config);
  const auto head_dim = read<int64_t>(fields, "head_dim", config.head_dim());
  TORCH_CHECK_VALUE(head_dim == config.head_dim(), "head_dim is ", head_dim,
                    "; the decoder here does hidden_size / num_attention_heads, ",
                    config.head_dim(), ", only");
  return config;
}

Json hf_of_llama(const LlamaConfig& config) {
  Json fields = {{"architectures", Json::array({"LlamaForCausalLM"})},
                 {"model_type", "llama"},
                 {"hidden_size", config.dim},
                 {"num_hidden_layers", config.layers},
                 {"num_attention_heads", config.heads},
                 {"num_key_value_heads", config.kv_heads},
                 {"intermediate_size", config.ffn},
                 {"vocab_size", config.vocab},
                 {"max_position_embeddings", config.seq},
                 {"tie_word_embeddings", config.tied},
                 {"rms_norm_eps", config.norm_eps},
                 {"rope_theta", config.rotary.theta},
                 {"hidden_act", "silu"},
                 {"attention_bias", false},
                 {"mlp_bias", false},
                 // The byte between documents.
                 {"bos_token_id", 0},
                 {"eos_token_id", 0}};
  if (const auto& scaling = config.rotary.scaling) {
    fields["rope_scaling"] = {{"rope_type", "llama3"},
                              {"factor", scaling->factor},
                              {"low_freq_factor", scaling->low},
                              {"high_freq_factor", scaling->high},
                              {"original_max_position_embeddings", scaling->positions}};
  }
  return fields;
}

}  // namespace fsdp2::train
