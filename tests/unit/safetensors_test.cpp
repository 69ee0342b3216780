// Safetensors files: round trips, and damaged or hostile files.

#include "support/errors.h"
#include "support/temporary_folder.h"

#include <fsdp2/safetensors.h>

#include <torch/torch.h>

#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp2 {
namespace {

using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using testing::TemporaryFolder;

std::string file_of(const std::string& header, const std::string& data) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + header + data;
}

TEST(Safetensors, KeepsEveryDtypeSizeAndOrder) {
  TemporaryFolder folder;
  std::vector<std::pair<std::string, torch::Tensor>> tensors;
  for (const auto dtype :
       {torch::kFloat64, torch::kFloat32, torch::kFloat16, torch::kBFloat16, torch::kInt64,
        torch::kInt32, torch::kInt16, torch::kInt8, torch::kUInt8, torch::kBool}) {
    tensors.emplace_back(std::string("z") + c10::toString(dtype),
                         torch::arange(6).to(dtype).view({2, 3}));
  }
  tensors.emplace_back("scalar", torch::tensor(2.5));
  tensors.emplace_back("empty", torch::empty({0, 4}));
  tensors.emplace_back("a \"quoted\" ü name", torch::arange(4.0).view({2, 2}).t());
  safetensors::save(folder.path("a"), tensors, {{"format", "pt"}});

  const safetensors::Reader reader(folder.path("a"));
  ASSERT_EQ(reader.entries().size(), tensors.size());
  EXPECT_EQ(reader.metadata().at("format"), "pt");
  for (const auto& [name, tensor] : tensors) {
    const auto read = reader.read(name);
    EXPECT_EQ(read.scalar_type(), tensor.scalar_type()) << name;
    EXPECT_TRUE(torch::equal(read, tensor)) << name;
  }
  EXPECT_FALSE(std::filesystem::exists(folder.path("a.tmp")));
}

TEST(Safetensors, TensorsOutliveTheReaderAndKeepTheFileAsItIs) {
  TemporaryFolder folder;
  safetensors::save(folder.path("a"), {{"x", torch::ones(3)}});
  auto x = safetensors::Reader(folder.path("a")).read("x");
  x.mul_(7);
  EXPECT_TRUE(torch::equal(x, torch::full(3, 7.0F)));
  EXPECT_TRUE(torch::equal(safetensors::Reader(folder.path("a")).read("x"), torch::ones(3)));
}

TEST(Safetensors, ReadsBytesThatAreNotAligned) {
  TemporaryFolder folder;
  const float value = 1.5F;
  const std::string header = R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                             R"("x":{"dtype":"F32","shape":[],"data_offsets":[1,5]}})";
  const auto path = folder.write(
      "a", file_of(header, "k" + std::string(reinterpret_cast<const char*>(&value), 4)));
  EXPECT_EQ(safetensors::Reader(path).read("x").item<float>(), 1.5F);
}

TEST(Safetensors, RefusesWhatIsNotASafetensorsFile) {
  TemporaryFolder folder;
  const auto reading = [&](const std::string& bytes) {
    const auto path = folder.write("bad", bytes);
    return error_of([&] { safetensors::Reader reader(path); });
  };
  const auto one = [](const std::string& entry) {
    return file_of("{\"x\":" + entry + "}", std::string(8, 'k'));
  };
  EXPECT_THAT(reading(""), HasSubstr("bad: too short"));
  EXPECT_THAT(reading(std::string(8, '\xff')), HasSubstr("not a safetensors file, or cut short"));
  EXPECT_THAT(reading(file_of("{\"x\":", "")), HasSubstr("not valid JSON"));
  EXPECT_THAT(reading(file_of("[1]", "")), HasSubstr("not a JSON object"));
  EXPECT_THAT(reading(one(R"({"dtype":"F32","shape":[2]})")), HasSubstr("entry x is malformed"));
  EXPECT_THAT(reading(one(R"({"dtype":"F33","shape":[2],"data_offsets":[0,8]})")),
              HasSubstr("unknown dtype F33"));
  EXPECT_THAT(reading(one(R"({"dtype":"F32","shape":[3],"data_offsets":[0,8]})")),
              HasSubstr("x should take 12 bytes"));
  EXPECT_THAT(reading(one(R"({"dtype":"F32","shape":[-2],"data_offsets":[0,8]})")),
              HasSubstr("impossible size"));
  EXPECT_THAT(
      reading(one(R"({"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,8]})")),
      HasSubstr("impossible size"));
  EXPECT_THAT(reading(one(R"({"dtype":"F32","shape":[1],"data_offsets":[4,8]})")),
              HasSubstr("from 0 on"));
  EXPECT_THAT(reading(one(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4]})")),
              HasSubstr("the file has 8"));
  EXPECT_THAT(reading(one(R"({"dtype":"F32","shape":[4],"data_offsets":[0,16]})")),
              HasSubstr("cut short?"));
  EXPECT_THAT(reading(file_of(R"({"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},)"
                              R"("x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
                              "")),
              HasSubstr("two tensors are called x"));
  EXPECT_THAT(error_of([&] { safetensors::Reader reader(folder.path("none")); }),
              HasSubstr("cannot open"));
  EXPECT_THAT(error_of([&] { safetensors::Reader reader(folder.path()); }),
              HasSubstr("not a regular file"));
}

TEST(Safetensors, SaysWhichTensorIsMissing) {
  TemporaryFolder folder;
  safetensors::save(folder.path("a"), {{"x", torch::ones(3)}});
  const safetensors::Reader reader(folder.path("a"));
  EXPECT_TRUE(reader.contains("x"));
  EXPECT_FALSE(reader.contains("y"));
  EXPECT_THAT(error_of([&] { reader.read("y"); }), HasSubstr("no tensor called y"));
}

TEST(SafetensorsWriter, LeavesTheOldFileUntilItIsComplete) {
  TemporaryFolder folder;
  safetensors::save(folder.path("a"), {{"x", torch::ones(3)}});
  {
    safetensors::Writer writer(folder.path("a"),
                               {{"x", torch::kFloat32, {3}}, {"y", torch::kFloat32, {1}}});
    EXPECT_THAT(error_of([&] { writer.write(torch::ones(4)); }), HasSubstr("x was announced as"));
    writer.write(torch::zeros(3));
    EXPECT_THAT(error_of([&] { writer.commit(); }), HasSubstr("only 1 of 2 tensors"));
  }
  EXPECT_FALSE(std::filesystem::exists(folder.path("a.tmp")));
  EXPECT_TRUE(torch::equal(safetensors::Reader(folder.path("a")).read("x"), torch::ones(3)));
}

TEST(SafetensorsWriter, RefusesNamesTwiceUnknownDtypesAndFolders) {
  TemporaryFolder folder;
  const auto writing = [&](const std::string& path,
                           const std::vector<safetensors::Entry>& entries) {
    return error_of([&] { safetensors::Writer writer(path, entries); });
  };
  EXPECT_THAT(writing(folder.path("a"), {{"x", torch::kFloat32, {1}}, {"x", torch::kFloat32, {1}}}),
              HasSubstr("two tensors are called x"));
  EXPECT_THAT(writing(folder.path("a"), {{"q", torch::kQInt8, {1}}}),
              HasSubstr("cannot hold q of dtype QInt8"));
  EXPECT_THAT(writing(folder.path("none/a"), {}), HasSubstr("cannot create"));
}

}  // namespace
}  // namespace fsdp2
