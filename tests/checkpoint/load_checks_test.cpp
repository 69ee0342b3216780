// What a load refuses, and what it says: keys, sizes and dtypes that differ, damaged files.

#include "support/errors.h"
#include "support/ranks.h"
#include "support/shards.h"
#include "support/temporary_folder.h"
#include "support/training.h"

#include <fsdp2/fsdp2.h>

#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp2::load_checks_test {
namespace {

namespace fs = std::filesystem;
using dcp::StateDict;
using fsdp2::testing::error_of;
using fsdp2::testing::full;
using fsdp2::testing::on_ranks;
using fsdp2::testing::sharded;
using fsdp2::testing::TemporaryFolder;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

torch::Tensor whole(const dcp::Value& value) { return full(value.to_tensor()); }
bool is_all(const dcp::Value& value, double number) {
  const torch::Tensor tensor = whole(value);
  return torch::equal(tensor, torch::full_like(tensor, number));
}

TEST(LoadChecks, KeysThatAreMissingOrNotUsed) {
  const TemporaryFolder folder;
  const std::string path = folder.path("c");
  on_ranks(2, [&](int rank) {
    StateDict saved = {{"l1", sharded(torch::ones({4, 3}))},
                       {"l2", sharded(torch::full({2, 4}, 2.))}};
    dcp::save(saved, path);

    StateDict a = {{"l1", sharded(torch::zeros({4, 3}))}};
    EXPECT_THAT(dcp::load(a, path).unexpected, ElementsAre("l2"));
    EXPECT_TRUE(is_all(a["l1"], 1));

    const auto with_l3 = [] {
      return StateDict{{"l1", sharded(torch::zeros({4, 3}))},
                       {"l2", sharded(torch::zeros({2, 4}))},
                       {"l3", sharded(torch::full({5}, 9.))}};
    };
    StateDict b = with_l3();
    EXPECT_THAT(error_of([&] { dcp::load(b, path); }),
                AllOf(HasSubstr(path), HasSubstr("lacks l3"), HasSubstr("allow_partial")));
    EXPECT_TRUE(is_all(b["l1"], 0));
    const dcp::LoadReport report = dcp::load(b, path, {.allow_partial = true});
    EXPECT_THAT(report.missing, ElementsAre("l3"));
    EXPECT_THAT(report.unexpected, IsEmpty());
    EXPECT_TRUE(is_all(b["l1"], 1) && is_all(b["l2"], 2) && is_all(b["l3"], 9));

    StateDict c = {{"model", StateDict{{"l1", sharded(torch::zeros({4, 3}))}}}};
    EXPECT_THAT(error_of([&] { dcp::load(c, path); }),
                AllOf(HasSubstr("model.l1"), HasSubstr("did you mean l1?")));
    EXPECT_THAT(error_of([&] { dcp::load(c, path, {.allow_partial = true}); }),
                AllOf(HasSubstr("none of the keys"), HasSubstr("model.l1")));

    // One rank alone asks for more: everyone hears of it, and nothing has been written.
    StateDict d = with_l3();
    if (rank != 1) d.erase("l3");
    EXPECT_THAT(error_of([&] { dcp::load(d, path); }), AllOf(HasSubstr("rank 1"), HasSubstr("l3")));
    EXPECT_TRUE(is_all(d["l1"], 0));

    StateDict e = with_l3();
    EXPECT_THAT(dcp::load(e, path, {.only = {"l2"}}).missing, IsEmpty());
    EXPECT_TRUE(is_all(e["l1"], 0) && is_all(e["l2"], 2));
  });
}

TEST(LoadChecks, SizesAndDtypesThatDiffer) {
  const TemporaryFolder folder;
  const std::string path = folder.path("c");
  on_ranks(2, [&](int) {
    torch::Tensor values = torch::arange(16.).view({4, 4}).to(torch::kFloat32);
    values[0][0] = 3.14159274;
    dcp::save({{"w", sharded(values)}, {"half", sharded(values.to(torch::kBFloat16))}}, path);

    for (const std::vector<int64_t>& sizes :
         {std::vector<int64_t>{6, 4}, std::vector<int64_t>{4, 2}, std::vector<int64_t>{16}}) {
      StateDict state = {{"w", sharded(torch::full(sizes, 9.))}};
      EXPECT_THAT(error_of([&] { dcp::load(state, path); }),
                  AllOf(HasSubstr("w: its size is"), HasSubstr("[4, 4] in the checkpoint"),
                        HasSubstr(c10::str(c10::IntArrayRef(sizes)))));
      EXPECT_TRUE(is_all(state["w"], 9));
    }

    StateDict narrow = {{"w", sharded(torch::full({4, 4}, 9., torch::kBFloat16))}};
    EXPECT_THAT(
        error_of([&] { dcp::load(narrow, path); }),
        AllOf(HasSubstr("w: "), HasSubstr("float32 to bfloat16"), HasSubstr("allow_narrowing")));
    EXPECT_TRUE(is_all(narrow["w"], 9));
    EXPECT_THAT(dcp::load(narrow, path, {.allow_narrowing = true}).converted,
                ElementsAre("w: float32 to bfloat16"));
    EXPECT_EQ(whole(narrow["w"])[0][0].item<double>(), 3.140625);
    EXPECT_EQ(narrow["w"].to_tensor().scalar_type(), torch::kBFloat16);

    StateDict wide = {{"w", sharded(torch::zeros({4, 4}, torch::kFloat64))}};
    EXPECT_THAT(dcp::load(wide, path).converted, ElementsAre("w: float32 to float64"));
    EXPECT_EQ(whole(wide["w"])[0][0].item<double>(), static_cast<double>(3.14159274F));

    StateDict from_half = {{"half", sharded(torch::zeros({4, 4}))}};
    EXPECT_THAT(dcp::load(from_half, path).converted, ElementsAre("half: bfloat16 to float32"));
    EXPECT_EQ(whole(from_half["half"])[0][0].item<double>(), 3.140625);

    StateDict integer = {{"w", sharded(torch::full({4, 4}, 9, torch::kInt64))}};
    EXPECT_THAT(error_of([&] { dcp::load(integer, path, {.allow_narrowing = true}); }),
                AllOf(HasSubstr("w: "), HasSubstr("float32 to int64")));
    EXPECT_TRUE(is_all(integer["w"], 9));

    StateDict object = {{"w", 7}};
    EXPECT_THAT(error_of([&] { dcp::load(object, path); }),
                AllOf(HasSubstr("w: "), HasSubstr("int"), HasSubstr("tensor")));
  });
}

void cut(const fs::path& file, double share) {
  fs::resize_file(file, static_cast<uintmax_t>(static_cast<double>(fs::file_size(file)) * share));
}
void flip(const fs::path& file, std::streamoff at) {
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekg(at);
  const char byte = static_cast<char>(stream.get());
  stream.seekp(at);
  stream.put(static_cast<char>(static_cast<uint8_t>(byte) ^ 0x40U));
}

/// Saves in `folder`, does `damage` to it and says what loading it says. The model keeps its
/// values.
std::string error_after(const std::function<void(const fs::path&)>& damage, bool verify = false) {
  const TemporaryFolder folder;
  const std::string path = folder.path("d2");
  const std::string said = folder.path("said");
  on_ranks(2, [&](int rank) {
    dcp::save({{"w", sharded(torch::full({6}, 2.))}, {"epoch", 3}}, path, {.threads = 1});
    if (rank == 0) damage(path);
    wait(barrier(world_group()));
    StateDict state = {{"w", sharded(torch::ones({6}))}, {"epoch", 1}};
    const std::string error = error_of([&] { dcp::load(state, path, {.verify = verify}); });
    EXPECT_TRUE(is_all(state["w"], 1));
    EXPECT_EQ(state["epoch"].to_int(), 1);
    const auto all = all_gather_bytes(error, world_group());
    EXPECT_EQ(all[0], all[1]);
    if (rank == 0) folder.write("said", error);
  });
  std::ifstream in(said);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST(LoadChecks, DamagedFilesAreNamedOnAllRanks) {
  EXPECT_THAT(
      error_after([](const fs::path& d) { fs::remove(d / ".metadata"); }),
      AllOf(HasSubstr("d2"), HasSubstr("not a complete checkpoint"), HasSubstr(".metadata")));
  EXPECT_THAT(error_after([](const fs::path& d) { cut(d / "__1_0.distcp", 0.5); }),
              AllOf(HasSubstr("__1_0.distcp"), HasSubstr("cut short")));
  EXPECT_THAT(error_after([](const fs::path& d) { fs::remove(d / "__1_0.distcp"); }),
              AllOf(HasSubstr("__1_0.distcp"), HasSubstr("missing")));
  EXPECT_THAT(error_after([](const fs::path& d) { cut(d / ".metadata", 0.5); }),
              AllOf(HasSubstr(".metadata"), HasSubstr("damaged")));
  EXPECT_THAT(error_after([](const fs::path& d) { flip(d / "__1_0.distcp", 1); }),
              AllOf(HasSubstr("__1_0.distcp"), HasSubstr("damaged")));
  EXPECT_THAT(error_after([](const fs::path& d) { fs::remove_all(d); }),
              HasSubstr("no checkpoint"));
}

TEST(LoadChecks, ChecksumsFindWhatTheStructureDoesNotShow) {
  // A flipped byte in the middle of an item's data.
  const auto flip_data = [](const fs::path& d) {
    for (const auto& entry : dcp::read_metadata(d).entries) {
      if (entry.key != "w") continue;
      const auto& place = entry.chunks[0].place;
      std::ifstream in(d / place.file, std::ios::binary);
      const std::string bytes((std::istreambuf_iterator<char>(in)), {});
      const float two = 2;
      const auto at = bytes.find(std::string(reinterpret_cast<const char*>(&two), 4) +
                                 std::string(reinterpret_cast<const char*>(&two), 4));
      flip(d / place.file, static_cast<std::streamoff>(at));
    }
  };
  EXPECT_THAT(error_after(flip_data, true), AllOf(HasSubstr("distcp"), HasSubstr("damaged")));

  const TemporaryFolder folder;
  dcp::save({{"w", torch::full({6}, 2.)}}, folder.path("c"));
  EXPECT_THAT(dcp::verify(folder.path("c")).problems, IsEmpty());
  flip_data(folder.path("c"));
  EXPECT_THAT(dcp::verify(folder.path("c")).problems, ElementsAre(HasSubstr("damaged")));
}

TEST(LoadChecks, PartsOfATensorThatNobodySaves) {
  on_ranks(2, [&](int rank) {
    const TemporaryFolder folder;
    const torch::Tensor w = sharded(torch::ones({4}));
    const ProcessGroup alone = new_group({0});
    if (rank == 0) {
      EXPECT_THAT(
          error_of([&] { dcp::save({{"w", w}}, folder.path("c"), {.process_group = alone}); }),
          AllOf(HasSubstr("w: "), HasSubstr("outside of the process group")));
      dcp::save({{"epoch", 1}}, folder.path("c"), {.process_group = alone});
    }
    StateDict partial = {
        {"p", DTensor::from_local(torch::ones({2}), init_device_mesh("cpu", {2}), {Partial()})}};
    EXPECT_THAT(error_of([&] { dcp::save(partial, folder.path("p")); }),
                AllOf(HasSubstr("p: "), HasSubstr("partial sums")));
    StateDict differs = {{"x", torch::ones({rank + 1})}};
    EXPECT_THAT(
        error_of([&] { dcp::save(differs, folder.path("x")); }),
        AllOf(HasSubstr("x is a plain float32 tensor of [1] on rank 0"), HasSubstr("rank 1")));
  });
}

}  // namespace
}  // namespace fsdp2::load_checks_test
