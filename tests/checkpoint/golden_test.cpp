// Checkpoints that several versions of PyTorch wrote (golden/make.py), as they lie in the
// repository.

#include <fsdp2/fsdp2.h>

#include <torch/torch.h>

#include <filesystem>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp2::golden_test {
namespace {

namespace fs = std::filesystem;

TEST(Golden, CheckpointsOfEveryVersionLoad) {
  std::vector<std::string> versions;
  for (const auto& entry : fs::directory_iterator(FSDP2_GOLDEN_CHECKPOINTS)) {
    if (!entry.is_directory()) continue;
    SCOPED_TRACE(entry.path().string());
    versions.push_back(entry.path().filename());
    EXPECT_TRUE(dcp::verify(entry.path()).problems.empty());
    const dcp::StateDict state = dcp::load_everything(entry.path());
    EXPECT_TRUE(torch::equal(state.at("model").at("weight").to_tensor(), torch::zeros({5, 3})));
    const auto& moments = state.at("optim").at("state").at("weight");
    EXPECT_EQ(moments.at("step").to_tensor().item<double>(), 1);
    EXPECT_TRUE(torch::allclose(moments.at("exp_avg").to_tensor(), torch::full({5, 3}, 0.1)));
    // The gradient is 1: 0.1 of it, and 0.001 of its square.
    EXPECT_TRUE(torch::allclose(moments.at("exp_avg_sq").to_tensor(), torch::full({5, 3}, 0.001)));
    EXPECT_TRUE(torch::equal(state.at("model").at("bias").to_tensor(), torch::zeros({5})));
    const auto& group = state.at("optim").at("param_groups").items()[0];
    EXPECT_EQ(group.at("lr").to_double(), 0.125);
    EXPECT_EQ(group.at("params").items()[1].to_string(), "bias");
    EXPECT_EQ(group.at("betas").kind(), "tuple");
    EXPECT_TRUE(torch::equal(state.at("half").to_tensor(), torch::arange(4).to(torch::kBFloat16)));
    EXPECT_EQ(state.at("scalar").to_tensor().dim(), 0);
    EXPECT_EQ(state.at("epoch").to_int(), 3);
    EXPECT_EQ(state.at("name").to_string(), "golden");
    EXPECT_TRUE(state.at("nothing").is_none());
    EXPECT_EQ(state.at("pair").items()[1].to_double(), 2.5);
    EXPECT_EQ(state.at("tags").items()[1].to_string(), "b");
    EXPECT_EQ(state.at("history").items()[1].at("loss").to_double(), 0.5);
    EXPECT_EQ(std::get<dcp::Bytes>(state.at("raw").variant()).data, std::string("\0\xff", 2));
  }
  EXPECT_THAT(versions,
              ::testing::IsSupersetOf({"torch_2_11", "torch_2_12", "torch_2_13", "torch_2_14"}));
}

}  // namespace
}  // namespace fsdp2::golden_test
