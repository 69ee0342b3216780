// `fsdp2 ckpt` as a user types it.

#include "support/command.h"
#include "support/temporary_folder.h"

#include <fsdp2/fsdp2.h>
#include <fsdp2/safetensors.h>

#include <torch/torch.h>

#include <filesystem>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace fsdp2::ckpt_command_test {
namespace {

namespace fs = std::filesystem;
using fsdp2::testing::CommandResult;
using fsdp2::testing::run_command;
using fsdp2::testing::TemporaryFolder;
using fsdp2::testing::test_variable;
using Json = nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

CommandResult ckpt(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {test_variable("FSDP2_BIN"), "ckpt"});
  return run_command(arguments);
}

std::string save_one(const std::string& path, double value) {
  dcp::StateDict state;
  state["model"]["w"] = torch::full({3, 2}, value);
  state["model"]["half"] = torch::ones({4}, torch::kBFloat16);
  state["epoch"] = 7;
  state["betas"] = dcp::Tuple{{0.9, 0.5}};
  dcp::save(state, path);
  return path;
}

TEST(CkptCommand, InfoListAndCat) {
  const TemporaryFolder folder;
  const std::string path = save_one(folder.path("c"), 2);
  const CommandResult info = ckpt({"info", path});
  EXPECT_EQ(info.exit_code, 0) << info.err;
  EXPECT_THAT(info.out, AllOf(HasSubstr("tensors  2, of 10 elements"), HasSubstr("objects  2")));
  EXPECT_EQ(Json::parse(ckpt({"info", path, "--json"}).out)["elements"], 10);
  EXPECT_THAT(ckpt({"ls", path}).out,
              AllOf(HasSubstr("model.w"), HasSubstr("[3, 2]"), HasSubstr("BFloat16")));
  EXPECT_EQ(Json::parse(ckpt({"ls", path, "--json", "--prefix", "model."}).out).size(), 2U);
  EXPECT_EQ(ckpt({"cat", path, "epoch"}).out, "7\n");
  EXPECT_THAT(ckpt({"cat", path, "betas"}).out, HasSubstr("(0.9"));
  const CommandResult unknown = ckpt({"cat", path, "model.ww"});
  EXPECT_EQ(unknown.exit_code, 1);
  EXPECT_THAT(unknown.err, AllOf(HasSubstr("model.ww"), HasSubstr("did you mean model.w?")));
}

TEST(CkptCommand, VerifyTellsDamageByItsExitCode) {
  const TemporaryFolder folder;
  const std::string path = save_one(folder.path("c"), 2);
  const CommandResult sound = ckpt({"verify", path});
  EXPECT_EQ(sound.exit_code, 0);
  EXPECT_THAT(sound.out, HasSubstr("4 items"));
  for (const auto& entry : fs::directory_iterator(path)) {
    if (entry.path().extension() == ".distcp") fs::resize_file(entry.path(), 100);
  }
  const CommandResult damaged = ckpt({"verify", path, "--json"});
  EXPECT_EQ(damaged.exit_code, 1);
  EXPECT_FALSE(Json::parse(damaged.out)["problems"].empty());
  EXPECT_EQ(ckpt({"verify", folder.path("none")}).exit_code, 2);
}

TEST(CkptCommand, DiffSaysWhatDiffers) {
  const TemporaryFolder folder;
  const std::string a = save_one(folder.path("a"), 2), b = save_one(folder.path("b"), 2.5);
  EXPECT_EQ(ckpt({"diff", a, a}).exit_code, 0);
  const CommandResult different = ckpt({"diff", a, b});
  EXPECT_EQ(different.exit_code, 1);
  EXPECT_EQ(different.out, "model.w: largest difference 0.5, in 6 of 6 elements\n");
}

TEST(CkptCommand, DiffsAndConvertsThousandsOfKeys) {
  const TemporaryFolder folder;
  dcp::StateDict state;
  for (int i = 0; i < 3000; ++i) state["layers"][std::to_string(i)] = torch::full({2}, i);
  for (const char* name : {"a", "b"}) dcp::save(state, folder.path(name));
  EXPECT_EQ(ckpt({"diff", folder.path("a"), folder.path("b")}).out, "no difference\n");
  const std::string file = folder.path("m.safetensors");
  ASSERT_EQ(ckpt({"convert", folder.path("a"), file}).exit_code, 0);
  EXPECT_EQ(safetensors::Reader(file).entries().size(), 3000U);
}

TEST(CkptCommand, ConvertsBetweenFormats) {
  const TemporaryFolder folder;
  const std::string path = save_one(folder.path("c"), 2);
  const std::string file = folder.path("m.safetensors"), back = folder.path("back"),
                    torch_file = folder.path("m.pt");
  ASSERT_EQ(ckpt({"convert", path, file, "--prefix", "model."}).exit_code, 0);
  EXPECT_TRUE(torch::equal(safetensors::Reader(file).read("w"), torch::full({3, 2}, 2.)));
  ASSERT_EQ(ckpt({"convert", file, back}).exit_code, 0);
  EXPECT_TRUE(
      torch::equal(dcp::load_everything(back).at("w").to_tensor(), torch::full({3, 2}, 2.)));
  ASSERT_EQ(ckpt({"convert", path, torch_file}).exit_code, 0);
  const dcp::Value whole = dcp::read_torch_file(torch_file);
  EXPECT_EQ(whole.at("epoch").to_int(), 7);
  EXPECT_TRUE(torch::equal(whole.at("model").at("w").to_tensor(), torch::full({3, 2}, 2.)));
  ASSERT_EQ(ckpt({"convert", torch_file, folder.path("again")}).exit_code, 0);
  EXPECT_EQ(ckpt({"diff", path, folder.path("again")}).exit_code, 0);
}

TEST(CkptCommand, PruneKeepsTheNewest) {
  const TemporaryFolder folder;
  for (const int step : {1, 2, 10}) save_one(folder.path("step_" + std::to_string(step)), step);
  const CommandResult pruned = ckpt({"prune", folder.path(), "--keep", "2"});
  EXPECT_EQ(pruned.exit_code, 0) << pruned.err;
  EXPECT_THAT(pruned.out, AllOf(HasSubstr("step_1\n"), HasSubstr("1 removed")));
  EXPECT_EQ(dcp::Checkpoints(folder.path()).steps(), (std::vector<int64_t>{2, 10}));
}

}  // namespace
}  // namespace fsdp2::ckpt_command_test
