#include "ddp/plan.h"

#include <fsdp2/collectives.h>
#include <fsdp2/dtensor.h>

#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_set>

namespace fsdp2::ddp {
namespace {

using Json = nlohmann::json;

template <class... Parts>
std::string text_of(const Parts&... parts) {
  return c10::str(parts...);
}

std::string kind_of(const torch::Tensor& tensor) {
  return text_of(tensor.scalar_type(), " ", tensor.sizes(),
                 tensor.requires_grad() ? "" : ", frozen");
}

void check_options(const ReplicateOptions& options, const torch::nn::Module& module) {
  TORCH_CHECK_VALUE(options.bucket_cap_mb > 0, "bucket_cap_mb must be positive, got ",
                    options.bucket_cap_mb);
  TORCH_CHECK(!is_replicated(module), "this ", module.name(), " is replicated already");
  const auto parameters = module.named_parameters();
  for (const auto& name : options.ignored_parameters) {
    TORCH_CHECK_VALUE(parameters.contains(name), "there is no parameter '", name, "' to ignore");
  }
}

template <class Impl>
bool makes_sparse_gradients(const torch::nn::Module& module) {
  const auto* embedding = module.as<Impl>();
  return embedding && embedding->options.sparse();
}

void check_modules(const torch::nn::Module& root) {
  for (const auto& item : root.named_modules()) {
    TORCH_CHECK(!makes_sparse_gradients<torch::nn::EmbeddingImpl>(*item.value()) &&
                    !makes_sparse_gradients<torch::nn::EmbeddingBagImpl>(*item.value()),
                "the module '", item.key(),
                "' makes sparse gradients, which are not averaged: make it with sparse(false)");
  }
}

Plan collect(const std::shared_ptr<torch::nn::Module>& module, const DeviceMesh& mesh,
             const ReplicateOptions& options) {
  Plan plan;
  plan.module = module;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : module->named_parameters()) {
    const torch::Tensor& tensor = item.value();
    const auto& ignored = options.ignored_parameters;
    if (std::find(ignored.begin(), ignored.end(), item.key()) != ignored.end()) continue;
    TORCH_CHECK(!is_dtensor(tensor), "the parameter '", item.key(),
                "' is a DTensor: replicate() is for plain parameters; for replicas of shards give "
                "fully_shard a 2-D mesh");
    TORCH_CHECK(tensor.device() == mesh.device(), "the parameter '", item.key(), "' is on ",
                tensor.device(), " but the mesh is on ", mesh.device(),
                ": move the module with to() first");
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    plan.values.push_back(tensor);
    if (!tensor.requires_grad()) continue;
    TORCH_CHECK(tensor.is_leaf(), "the parameter '", item.key(), "' is not a leaf");
    plan.trained.push_back(tensor);
    plan.trained_names.push_back(item.key());
  }
  TORCH_CHECK(!plan.trained.empty(), "no parameter of this ", module->name(), " requires grad");
  for (const auto& buffer : module->buffers()) plan.values.push_back(buffer);
  return plan;
}

/// All that must be the same on all ranks, in a form that a message may quote.
Json describe(const torch::nn::Module& module, const ReplicateOptions& options) {
  Json values = Json::array();
  for (const auto& item : module.named_parameters()) {
    values.push_back({"parameter '" + item.key() + "'", kind_of(item.value())});
  }
  for (const auto& item : module.named_buffers()) {
    values.push_back({"buffer '" + item.key() + "'", kind_of(item.value())});
  }
  const std::pair<const char*, std::string> fields[] = {
      {"bucket_cap_mb", text_of(options.bucket_cap_mb)},
      {"gradient_as_bucket_view", text_of(options.gradient_as_bucket_view)},
      {"find_unused_parameters", text_of(options.find_unused_parameters)},
      {"static_graph", text_of(options.static_graph)},
      {"broadcast_buffers", text_of(options.broadcast_buffers)},
      {"init_sync", text_of(options.init_sync)},
      {"ignored_parameters", Json(options.ignored_parameters).dump()}};
  for (const auto& [name, value] : fields) {
    values.push_back({std::string("option ") + name, value});
  }
  return values;
}

/// In words, the first thing in which two ranks differ.
std::string difference(const Json& first, const Json& other, size_t rank) {
  for (size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
    if (i < first.size() && i < other.size() && first[i] == other[i]) continue;
    const auto words = [i](const Json& list) {
      if (i >= list.size()) return std::string("nothing more");
      return list[i][0].get<std::string>() + " (" + list[i][1].get<std::string>() + ")";
    };
    return text_of("rank 0 has ", words(first), " where rank ", rank, " has ", words(other));
  }
  return {};
}

}  // namespace

Plan make_plan(const std::shared_ptr<torch::nn::Module>& module, const DeviceMesh& mesh,
               const ReplicateOptions& options) {
  Plan plan;
  Json mine = {{"error", ""}, {"values", Json::array()}};
  try {
    TORCH_CHECK(module, "the module is null");
    check_options(options, *module);
    check_modules(*module);
    plan = collect(module, mesh, options);
    mine["values"] = describe(*module, options);
  } catch (const c10::Error& error) {
    mine["error"] = error.what_without_backtrace();
  }
  const auto texts = all_gather_bytes(mine.dump(), mesh.get_group());
  std::vector<Json> all;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    all.push_back(Json::parse(texts[rank]));
    const auto error = all.back()["error"].get<std::string>();
    TORCH_CHECK(error.empty(), "replicate: ", error, " (rank ", rank, " of ", texts.size(), ")");
  }
  for (size_t rank = 1; rank < all.size(); ++rank) {
    const std::string found = difference(all[0]["values"], all[rank]["values"], rank);
    TORCH_CHECK(found.empty(), "replicate: the ranks hold different modules: ", found);
  }
  return plan;
}

}  // namespace fsdp2::ddp
