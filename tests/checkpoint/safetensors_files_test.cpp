// Sharded parameters from and into safetensors files and folders.

#include "support/errors.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "support/training.h"

#include <fsdp2/fsdp2.h>

#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace fsdp2::safetensors_files_test {
namespace {

namespace fs = std::filesystem;
using dcp::StateDict;
using fsdp2::testing::error_of;
using fsdp2::testing::full;
using fsdp2::testing::on_ranks;
using fsdp2::testing::TemporaryFolder;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

StateDict state_on(int64_t ranks, bool empty) {
  const DeviceMesh mesh = init_device_mesh("cpu", {ranks});
  const auto tensor = [&](const std::vector<int64_t>& sizes, int64_t dim, torch::ScalarType dtype) {
    const torch::Tensor values =
        empty ? torch::zeros(sizes, dtype)
              : torch::arange(torch::empty(sizes).numel()).reshape(sizes).to(dtype);
    return chunk_tensor(values, mesh, {Shard(dim)});
  };
  StateDict state = {
      {"embed.weight", tensor({7, 3}, 0, torch::kFloat32)},
      {"wide.weight", tensor({4, 6}, 1, torch::kBFloat16)},
      {"small.bias", tensor({2}, 0, torch::kFloat32)},
      {"counter", empty ? torch::zeros({}, torch::kInt64) : torch::tensor(int64_t{9})}};
  state["head.weight"] = state["embed.weight"];  // tied
  return state;
}

void expect_filled(const StateDict& state, int64_t ranks) {
  const StateDict wanted = state_on(ranks, false);
  for (const auto& [key, value] : state) {
    EXPECT_TRUE(torch::equal(full(value.to_tensor()), full(wanted.at(key).to_tensor()))) << key;
  }
}

TEST(SafetensorsFiles, OneOrManyFromAnyNumberOfRanks) {
  for (const uint64_t most : {uint64_t{5'000'000'000}, uint64_t{60}}) {
    const TemporaryFolder folder;
    const std::string path = folder.path("model");
    on_ranks(3,
             [&](int) { safetensors::save_files(state_on(3, false), path, {.most_bytes = most}); });
    EXPECT_EQ(fs::exists(fs::path(path) / "model.safetensors.index.json"), most == 60);
    for (const int ranks : {1, 2, 4}) {
      on_ranks(ranks, [&](int) {
        StateDict state = state_on(ranks, true);
        const auto report = safetensors::load_files(state, path);
        EXPECT_THAT(report.missing, IsEmpty());  // head.weight is embed.weight
        EXPECT_THAT(report.unexpected, IsEmpty());
        expect_filled(state, ranks);
      });
    }
  }
}

TEST(SafetensorsFiles, OneFormReplacesTheOther) {
  const TemporaryFolder folder;
  const fs::path path = folder.path("m");
  on_ranks(2, [&](int) {
    for (const uint64_t most : {uint64_t{5'000'000'000}, uint64_t{60}, uint64_t{5'000'000'000}}) {
      safetensors::save_files(state_on(2, false), path, {.most_bytes = most});
      EXPECT_EQ(fs::exists(path / "model.safetensors"), most > 60);
      EXPECT_EQ(fs::exists(path / "model.safetensors.index.json"), most == 60);
      wait(barrier(world_group()));
    }
  });
}

TEST(SafetensorsFiles, NamesAreMapped) {
  const TemporaryFolder folder;
  on_ranks(1, [&](int) {
    const auto add = [](const std::string& name) { return "model." + name; };
    StateDict state = state_on(1, false);
    state.erase("head.weight");
    safetensors::save_files(state, folder.path("m"), {.name = add});
    const safetensors::Reader reader(folder.path("m/model.safetensors"));
    EXPECT_TRUE(reader.contains("model.embed.weight"));
    StateDict back = state_on(1, true);
    safetensors::load_files(back, folder.path("m"), {.name = add});
    expect_filled(back, 1);
  });
}

TEST(SafetensorsFiles, WhatDoesNotFitIsNamedOnAllRanks) {
  const TemporaryFolder folder;
  const std::string path = folder.path("m");
  on_ranks(2, [&](int rank) {
    safetensors::save_files(state_on(2, false), path, {.most_bytes = 60});
    const auto error_with = [&](const std::function<void(StateDict&)>& change) {
      StateDict state = state_on(2, true);
      change(state);
      const std::string error = error_of([&] { safetensors::load_files(state, path); });
      EXPECT_EQ(DTensor(state["embed.weight"].to_tensor()).full_tensor().abs().max().item<float>(),
                0);
      return error;
    };
    EXPECT_THAT(error_with([](StateDict& s) { s["embed.weights"] = torch::ones({2}); }),
                AllOf(HasSubstr("lacks embed.weights"), HasSubstr("did you mean embed.weight?")));
    EXPECT_THAT(error_with([](StateDict& s) { s["counter"] = torch::ones({2}, torch::kInt64); }),
                AllOf(HasSubstr("counter: its size is [2]"), HasSubstr("[] in the file")));
    EXPECT_THAT(error_with([](StateDict& s) { s["counter"] = torch::zeros({}, torch::kBool); }),
                AllOf(HasSubstr("counter: "), HasSubstr("int64 to bool")));

    StateDict some = {{"embed.weight", state_on(2, true)["embed.weight"]}};
    EXPECT_THAT(safetensors::load_files(some, path).unexpected,
                ElementsAre("counter", "small.bias", "wide.weight"));
    wait(barrier(world_group()));
    if (rank == 0) fs::remove(fs::path(path) / "model-00002-of-00003.safetensors");
    wait(barrier(world_group()));
    EXPECT_THAT(error_with([](StateDict&) {}),
                AllOf(HasSubstr("model-00002-of-00003.safetensors"), HasSubstr("missing")));
  });
}

}  // namespace
}  // namespace fsdp2::safetensors_files_test
