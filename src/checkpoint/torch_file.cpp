#include "checkpoint/archive.h"
#include "checkpoint/file_io.h"
#include "checkpoint/objects.h"

#include <fsdp2/dcp.h>
#include <fsdp2/dtensor.h>

#include <c10/util/Exception.h>

#include <filesystem>

namespace fsdp2::dcp {

void write_torch_file(const StateDict& state, const std::string& path) {
  torch::NoGradGuard no_grad;
  std::vector<torch::Tensor> tensors;
  pickle::Writer out;
  write_value(state, out, [&](const torch::Tensor& tensor, pickle::Writer& to) {
    TORCH_CHECK_VALUE(tensor.defined() && !is_dtensor(tensor),
                      "a torch.save file holds whole tensors: full_tensor() of sharded ones first");
    tensors.push_back(tensor.detach().cpu().contiguous());
    put_tensor(tensors.back(), tensors.size() - 1, to);
  });
  const std::string pickle = out.finish();
  const std::string temporary = path + ".tmp";
  std::filesystem::remove(temporary);
  files::WriteFile file(temporary);
  write_archive(pickle, tensors, [&](const void* data, size_t size) { file.write(data, size); });
  file.sync();
  std::filesystem::rename(temporary, path);
}

}  // namespace fsdp2::dcp
