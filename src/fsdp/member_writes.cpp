#include "fsdp/member_writes.h"

#include "fsdp/gathered_storage.h"
#include "fsdp/param_group.h"
#include "fsdp/plain_ops.h"
#include "mesh/mesh_impl.h"

#include <fsdp2/dtensor.h>

#include <algorithm>

namespace fsdp2::fsdp {
namespace {

bool is_whole(const torch::Tensor& tensor, const ParamLayout& layout) {
  return tensor.storage_offset() == 0 && tensor.sizes() == layout.sizes &&
         tensor.strides() == layout.strides;
}

/// A parameter's whole values, in the dtype of the shard, to be written through views.
struct WholeValues {
  Param* param;
  torch::Tensor values;
};

torch::Tensor gather_values(const Param& param) {
  const torch::Tensor full = DTensor(param.shard.detach()).full_tensor();
  torch::Tensor values =
      at::empty_strided(param.layout.sizes, param.layout.strides, full.options());
  values.copy_(full);
  return values;
}

/// Replicas must not drift apart, whatever their seeds.
void agree(const torch::Tensor& values, const DeviceMesh& mesh) {
  const torch::Tensor sent = values.contiguous();
  broadcast_from_first(sent, mesh, "random values of a parameter");
  if (!sent.is_same(values)) values.copy_(sent);
}

bool draws(const c10::OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  return std::any_of(arguments.begin(), arguments.end(),
                     [](const auto& argument) { return argument.name() == "generator"; });
}

}  // namespace

void write_to_shards(const c10::OperatorHandle& op, const dispatch::OpInfo& info,
                     torch::jit::Stack& stack) {
  std::vector<WholeValues> wholes;
  std::vector<torch::Tensor> written;
  PlainOps plain;
  dispatch::map_arguments(
      info, stack, [&](const torch::Tensor& tensor, size_t i) -> std::optional<torch::Tensor> {
        if (info.written[i]) written.push_back(tensor);
        if (!info.written[i] || !is_gathered(tensor)) return std::nullopt;
        const GatheredStorage& storage = *gathered_storage(tensor);
        Param& param = storage.group()->params()[storage.index()];
        if (is_whole(tensor, param.layout)) return param.shard;
        TORCH_CHECK(tensor.scalar_type() == param.layout.dtype, op.schema().name(),
                    " writes to a view of the parameter '", param.layout.name,
                    "' that sees it in another dtype: write to the entry of parameters() instead");
        auto known = std::find_if(wholes.begin(), wholes.end(),
                                  [&](const WholeValues& whole) { return whole.param == &param; });
        if (known == wholes.end())
          known = wholes.insert(wholes.end(), {&param, gather_values(param)});
        return known->values.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
      });
  op.callBoxed(stack);
  for (const WholeValues& whole : wholes) {
    const GatheredStorage& storage =
        *static_cast<GatheredStorage*>(whole.param->storage.lock().get());
    if (draws(op)) agree(whole.values, storage.group()->mesh());
    torch::Tensor shard = whole.param->shard;
    shard.copy_(whole.values);
  }
  // What was written is what is returned.
  if (info.returns > written.size()) return;
  for (size_t i = 0; i < info.returns; ++i) {
    c10::IValue& value = stack[stack.size() - info.returns + i];
    if (value.isTensor()) value = written[i];
  }
}

}  // namespace fsdp2::fsdp
