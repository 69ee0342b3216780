#include <fsdp2/all_gather_formats.h>

#include <array>

namespace fsdp2 {
namespace {

/// Largest magnitudes along the last dimension, 1 where all is zero.
torch::Tensor largest(const torch::Tensor& values) {
  const torch::Tensor magnitude = values.abs().amax(-1, /*keepdim=*/true);
  return at::where(magnitude > 0, magnitude, at::ones_like(magnitude));
}

/// [n] -> [blocks, block] in float, padded with zeros.
torch::Tensor in_blocks(const torch::Tensor& shard, int64_t block) {
  const int64_t blocks = (shard.numel() + block - 1) / block;
  torch::Tensor padded = at::zeros({blocks * block}, shard.options().dtype(torch::kFloat));
  padded.narrow(0, 0, shard.numel()).copy_(shard);
  return padded.view({blocks, block});
}

/// [ranks, blocks, block] -> out [ranks, n].
void from_blocks(const torch::Tensor& values, const torch::Tensor& out) {
  out.copy_(values.flatten(1).narrow(1, 0, out.size(1)));
}

class Float8 final : public AllGatherExtension {
  std::vector<torch::Tensor> pre_all_gather(const torch::Tensor& shard) override {
    constexpr float kLargest = 448;  // of e4m3
    if (shard.numel() == 0) return {};
    const torch::Tensor scale = largest(shard.to(torch::kFloat)) / kLargest;
    return {(shard / scale).to(torch::kFloat8_e4m3fn).view(torch::kByte), scale};
  }
  void post_all_gather(const std::vector<torch::Tensor>& gathered,
                       const torch::Tensor& out) override {
    if (gathered.empty()) return;
    out.copy_(gathered[0].view(torch::kFloat8_e4m3fn).to(torch::kFloat) * gathered[1]);
  }
};

class Int8 final : public AllGatherExtension {
 public:
  explicit Int8(int64_t block) : block_(block) {}
  std::vector<torch::Tensor> pre_all_gather(const torch::Tensor& shard) override {
    if (shard.numel() == 0) return {};
    const torch::Tensor blocks = in_blocks(shard, block_);
    const torch::Tensor scale = largest(blocks) / 127;
    return {(blocks / scale).round().to(torch::kChar), scale};
  }
  void post_all_gather(const std::vector<torch::Tensor>& gathered,
                       const torch::Tensor& out) override {
    if (!gathered.empty()) from_blocks(gathered[0].to(torch::kFloat) * gathered[1], out);
  }

 private:
  int64_t block_;
};

class NormalFloat4 final : public AllGatherExtension {
 public:
  explicit NormalFloat4(int64_t block) : block_(block) {}
  std::vector<torch::Tensor> pre_all_gather(const torch::Tensor& shard) override {
    if (shard.numel() == 0) return {};
    const torch::Tensor blocks = in_blocks(shard, block_);
    const torch::Tensor scale = largest(blocks);
    const torch::Tensor table = levels(blocks.device());
    const torch::Tensor middles = (table.narrow(0, 0, 15) + table.narrow(0, 1, 15)) / 2;
    const torch::Tensor codes =
        at::bucketize(blocks / scale, middles).to(torch::kByte).view({-1, 2});
    return {codes.select(1, 0) * 16 + codes.select(1, 1), scale};
  }
  void post_all_gather(const std::vector<torch::Tensor>& gathered,
                       const torch::Tensor& out) override {
    if (gathered.empty()) return;
    const torch::Tensor& packed = gathered[0];
    const torch::Tensor codes = at::stack({at::div(packed, 16, "floor"), packed.remainder(16)}, -1);
    const torch::Tensor values =
        levels(out.device()).index_select(0, codes.flatten().to(torch::kLong));
    const torch::Tensor& scale = gathered[1];
    from_blocks(values.view({scale.size(0), scale.size(1), block_}) * scale, out);
  }

 private:
  static torch::Tensor levels(c10::Device device) {
    static const std::array<float, 16> kLevels = {
        -1.0F,        -0.69619280F, -0.52507305F, -0.39491749F, -0.28444138F, -0.18477343F,
        -0.09105004F, 0.0F,         0.07958030F,  0.16093020F,  0.24611230F,  0.33791524F,
        0.44070983F,  0.56261700F,  0.72295684F,  1.0F};
    return torch::tensor(at::ArrayRef<float>(kLevels.data(), kLevels.size())).to(device);
  }
  int64_t block_;
};

}  // namespace

std::shared_ptr<AllGatherExtension> float8_all_gather() { return std::make_shared<Float8>(); }

std::shared_ptr<AllGatherExtension> int8_all_gather(int64_t block) {
  TORCH_CHECK_VALUE(block > 0, "int8_all_gather: a block has at least one element, not ", block);
  return std::make_shared<Int8>(block);
}

std::shared_ptr<AllGatherExtension> nf4_all_gather(int64_t block) {
  TORCH_CHECK_VALUE(block > 0 && block % 2 == 0,
                    "nf4_all_gather: a block has an even number of elements, not ", block);
  return std::make_shared<NormalFloat4>(block);
}

}  // namespace fsdp2
