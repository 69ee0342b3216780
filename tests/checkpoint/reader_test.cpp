// A checkpoint that stays open: its metadata is read once, however many keys are read.

#include "support/errors.h"
#include "support/temporary_folder.h"

#include <fsdp2/fsdp2.h>

#include <torch/torch.h>

#include <filesystem>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp2::reader_test {
namespace {

namespace fs = std::filesystem;
using dcp::StateDict;
using fsdp2::testing::error_of;
using fsdp2::testing::TemporaryFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Reader, ReadsThousandsOfKeysAndTheMetadataOnce) {
  constexpr int64_t layers = 2000;
  const TemporaryFolder folder;
  const std::string path = folder.path("c");
  StateDict state;
  for (int64_t i = 0; i < layers; ++i) {
    dcp::Value& layer = state["layers"][std::to_string(i)];
    layer["w"] = torch::full({3}, i);
    layer["step"] = i;
  }
  dcp::save(state, path);
  const dcp::Reader reader(path);
  fs::remove(fs::path(path) / ".metadata");  // whoever reads it again, fails
  const std::vector<std::string> keys = reader.keys();
  ASSERT_EQ(keys.size(), 2U * layers);
  EXPECT_EQ(keys.size(), reader.metadata().entries.size());
  for (int64_t i = 0; i < layers; ++i) {
    const std::string prefix = "layers." + std::to_string(i);
    ASSERT_TRUE(torch::equal(reader.load_one(prefix + ".w").to_tensor(), torch::full({3}, i)));
    ASSERT_EQ(reader.load_one(prefix + ".step").to_int(), i);
  }
  const StateDict all = reader.load_everything();
  EXPECT_EQ(all.at("layers").dict().size(), static_cast<size_t>(layers));
  EXPECT_EQ(all.at("layers").at("7").at("step").to_int(), 7);
}

TEST(Reader, SaysWhatIsMissing) {
  const TemporaryFolder folder;
  const std::string path = folder.path("c");
  EXPECT_THAT(error_of([&] { dcp::Reader{path}; }),
              AllOf(HasSubstr("there is no checkpoint"), HasSubstr(path)));
  dcp::save({{"weight", torch::ones({2})}}, path);
  dcp::Reader reader(path);
  EXPECT_THAT(
      error_of([&] { reader.load_one("weights"); }),
      AllOf(HasSubstr(path), HasSubstr("has no weights"), HasSubstr("did you mean weight?")));
  dcp::Reader moved = std::move(reader);
  EXPECT_EQ(moved.keys(), (std::vector<std::string>{"weight"}));
}

}  // namespace
}  // namespace fsdp2::reader_test
