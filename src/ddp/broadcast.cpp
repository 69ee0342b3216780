#include "ddp/replica.h"

#include <fsdp2/collectives.h>

#include <torch/torch.h>

#include <map>

namespace fsdp2::ddp {
namespace {

constexpr size_t kChunkBytes = size_t{25} << 20;

void broadcast_chunk(const std::vector<torch::Tensor>& tensors, const ProcessGroup& group) {
  std::vector<torch::Tensor> flat;
  for (const auto& tensor : tensors) flat.push_back(tensor.reshape({-1}));
  const torch::Tensor all = torch::cat(flat);
  wait(broadcast(all, 0, group), "broadcast of a module's values");
  if (group->getRank() == 0) return;
  int64_t start = 0;
  for (const auto& tensor : tensors) {
    tensor.copy_(all.narrow(0, start, tensor.numel()).view(tensor.sizes()));
    start += tensor.numel();
  }
}

}  // namespace

void broadcast_values(const std::vector<torch::Tensor>& tensors, const ProcessGroup& group) {
  if (group->getSize() == 1) return;
  const torch::NoGradGuard no_grad;
  std::map<std::pair<torch::ScalarType, std::string>, std::vector<torch::Tensor>> kinds;
  for (const auto& tensor : tensors) {
    if (!tensor.defined() || tensor.numel() == 0) continue;
    auto& chunk = kinds[{tensor.scalar_type(), tensor.device().str()}];
    chunk.push_back(tensor);
    size_t bytes = 0;
    for (const auto& waiting : chunk) bytes += waiting.nbytes();
    if (bytes >= kChunkBytes) broadcast_chunk(std::exchange(chunk, {}), group);
  }
  for (const auto& [kind, chunk] : kinds) {
    if (!chunk.empty()) broadcast_chunk(chunk, group);
  }
}

}  // namespace fsdp2::ddp
