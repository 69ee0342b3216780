// What is saved comes back, from any number of ranks and layout into any other.

#include "support/counting_allocator.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "support/training.h"

#include <fsdp2/fsdp2.h>

#include <torch/torch.h>

#include <filesystem>
#include <gtest/gtest.h>

namespace fsdp2::round_trip_test {
namespace {

using dcp::StateDict;
using dcp::Value;
using fsdp2::testing::CountingAllocator;
using fsdp2::testing::full;
using fsdp2::testing::on_ranks;
using fsdp2::testing::TemporaryFolder;

/// 0, 1, 2, ... of this size, in this dtype.
torch::Tensor counting(const std::vector<int64_t>& sizes, torch::ScalarType dtype) {
  const int64_t count = torch::empty(sizes).numel();
  return torch::arange(count, torch::kFloat64).reshape(sizes).to(dtype);
}

/// Tensors of many sizes, laid out in many ways over `mesh`; `empty` for those to be loaded into.
StateDict tensors_on(const DeviceMesh& mesh, bool empty) {
  const auto make = [&](const std::vector<int64_t>& sizes, torch::ScalarType dtype,
                        const Placements& placements) -> Value {
    torch::Tensor tensor = counting(sizes, dtype);
    if (empty) tensor.zero_();
    return chunk_tensor(tensor, mesh, placements);
  };
  const auto all = [&](const Placement& placement) {
    Placements placements(static_cast<size_t>(mesh.ndim()), Replicate());
    placements.back() = placement;
    return placements;
  };
  StateDict state;
  state["rows"] = make({7, 3}, torch::kFloat32, all(Shard(0)));
  state["columns"] = make({4, 6}, torch::kFloat32, all(Shard(1)));
  state["few"] = make({2}, torch::kFloat64, all(Shard(0)));
  state["bf16"] = make({5, 2, 2}, torch::kBFloat16, all(Shard(0)));
  state["everywhere"] = make({3, 2}, torch::kInt32, all(Replicate()));
  state["scalar"] = make({}, torch::kFloat32, all(Replicate()));
  state["nothing"] = make({0, 3}, torch::kFloat32, all(Shard(0)));
  state["nested"]["plain"] = empty ? torch::zeros({3}) : counting({3}, torch::kFloat32);
  state["nested"]["list"] =
      dcp::List{empty ? torch::zeros({2}) : torch::ones({2}),
                StateDict{{"step", empty ? torch::tensor(0.) : torch::tensor(7.)}, {"name", "a"}}};
  return state;
}

void expect_equal(const Value& value, const Value& wanted, const std::string& name) {
  if (wanted.is_dict()) {
    for (const auto& [key, item] : wanted.dict()) {
      expect_equal(value.at(key), item, c10::str(name, '.', key));
    }
    return;
  }
  if (wanted.is<dcp::List>()) {
    ASSERT_EQ(value.items().size(), wanted.items().size()) << name;
    for (size_t i = 0; i < wanted.items().size(); ++i) {
      expect_equal(value.items()[i], wanted.items()[i], c10::str(name, '.', i));
    }
    return;
  }
  ASSERT_EQ(value.kind(), wanted.kind()) << name;
  if (!wanted.is_tensor()) return;
  const torch::Tensor is = full(value.to_tensor()), should_be = full(wanted.to_tensor());
  EXPECT_EQ(is.scalar_type(), should_be.scalar_type()) << name;
  EXPECT_EQ(is.sizes(), should_be.sizes()) << name;
  EXPECT_TRUE(torch::equal(is, should_be)) << name << ": " << is << " instead of " << should_be;
}

DeviceMesh mesh_of(const std::vector<int64_t>& shape) {
  return init_device_mesh("cpu", shape,
                          shape.size() == 2 ? std::vector<std::string>{"replicate", "shard"}
                                            : std::vector<std::string>{"shard"});
}
int ranks_of(const std::vector<int64_t>& shape) {
  int ranks = 1;
  for (const int64_t size : shape) ranks *= static_cast<int>(size);
  return ranks;
}

using Shape = std::vector<int64_t>;
class Layouts : public ::testing::TestWithParam<Shape> {};

TEST_P(Layouts, LoadIntoAnyOther) {
  const TemporaryFolder folder;
  const std::string path = folder.path("checkpoint");
  on_ranks(ranks_of(GetParam()),
           [&](int) { dcp::save(tensors_on(mesh_of(GetParam()), false), path); });
  for (const Shape& shape : {Shape{1}, Shape{2}, Shape{3}, Shape{4}, Shape{2, 2}}) {
    on_ranks(ranks_of(shape), [&](int) {
      const DeviceMesh mesh = mesh_of(shape);
      StateDict state = tensors_on(mesh, true);
      const dcp::LoadReport report = dcp::load(state, path, {.verify = true});
      EXPECT_TRUE(report.missing.empty() && report.unexpected.empty() && report.converted.empty());
      expect_equal(state, tensors_on(mesh, false), "state");
    });
  }
  const StateDict state = dcp::load_everything(path);
  EXPECT_TRUE(torch::equal(state.at("columns").to_tensor(), counting({4, 6}, torch::kFloat32)));
  EXPECT_EQ(state.at("nested").at("list").items()[1].at("name").to_string(), "a");
  const dcp::VerifyReport report = dcp::verify(path);
  EXPECT_TRUE(report.problems.empty()) << report.problems[0];
  EXPECT_TRUE(report.has_checksums);
}

INSTANTIATE_TEST_SUITE_P(RoundTrip, Layouts,
                         ::testing::Values(Shape{1}, Shape{2}, Shape{3}, Shape{4}, Shape{2, 2}));

TEST(RoundTrip, KeepsEveryKindOfValue) {
  const TemporaryFolder folder;
  StateDict state;
  state["none"] = dcp::None{};
  state["yes"] = true;
  state["no"] = false;
  state["small"] = 7;
  state["negative"] = -3;
  state["large"] = int64_t{1'099'511'627'776};
  state["float"] = 0.001;
  state["text"] = "sch\xc3\xb6n";
  state["bytes"] = dcp::Bytes{std::string("\0\xff", 2)};
  state["betas"] = dcp::Tuple{{0.9, 0.95}};
  state["params"] = dcp::List{"a", "b"};
  state["mixed"] = dcp::List{1, dcp::List{2, "x"}, dcp::None{}};
  state["history"] = dcp::List{StateDict{{"loss", 1.5}}, StateDict{{"loss", 0.5}}};
  state["empty list"] = dcp::List();
  dcp::save(state, folder.path("c"));
  const StateDict back = dcp::load_everything(folder.path("c"));
  ASSERT_EQ(back.size(), state.size());
  EXPECT_TRUE(back.at("none").is_none());
  EXPECT_TRUE(back.at("yes").to_bool());
  EXPECT_FALSE(back.at("no").to_bool());
  EXPECT_EQ(back.at("small").to_int(), 7);
  EXPECT_EQ(back.at("negative").to_int(), -3);
  EXPECT_EQ(back.at("large").to_int(), int64_t{1'099'511'627'776});
  EXPECT_EQ(back.at("float").to_double(), 0.001);
  EXPECT_EQ(back.at("text").to_string(), "sch\xc3\xb6n");
  EXPECT_EQ(std::get<dcp::Bytes>(back.at("bytes").variant()).data, std::string("\0\xff", 2));
  EXPECT_EQ(back.at("betas").kind(), "tuple");
  EXPECT_EQ(back.at("betas").items()[1].to_double(), 0.95);
  EXPECT_EQ(back.at("params").items()[1].to_string(), "b");
  EXPECT_EQ(back.at("mixed").items()[1].items()[1].to_string(), "x");
  EXPECT_EQ(back.at("history").items()[1].at("loss").to_double(), 0.5);
  EXPECT_TRUE(back.at("empty list").items().empty());
}

TEST(RoundTrip, KeepsEveryDtype) {
  const TemporaryFolder folder;
  StateDict state;
  for (const auto dtype : {torch::kUInt8,           torch::kInt8,
                           torch::kInt16,           torch::kInt32,
                           torch::kInt64,           torch::kFloat16,
                           torch::kFloat32,         torch::kFloat64,
                           torch::kComplexHalf,     torch::kComplexFloat,
                           torch::kComplexDouble,   torch::kBool,
                           torch::kBFloat16,        torch::kFloat8_e5m2,
                           torch::kFloat8_e4m3fn,   torch::kFloat8_e5m2fnuz,
                           torch::kFloat8_e4m3fnuz, torch::kFloat8_e8m0fnu,
                           torch::kUInt16,          torch::kUInt32,
                           torch::kUInt64}) {
    state[c10::toString(dtype)] = torch::tensor({0., 1., 2., 4.}).to(dtype);
  }
  dcp::save(state, folder.path("c"));
  const StateDict back = dcp::load_everything(folder.path("c"));
  for (const auto& [name, value] : state) {
    const torch::Tensor &is = back.at(name).to_tensor(), &should_be = value.to_tensor();
    EXPECT_EQ(is.scalar_type(), should_be.scalar_type());
    EXPECT_TRUE(torch::equal(is.view(torch::kUInt8), should_be.view(torch::kUInt8))) << name;
  }
}

TEST(RoundTrip, ZeroDimensionsSyncAndAsync) {
  for (const bool async : {false, true}) {
    const TemporaryFolder folder;
    on_ranks(2, [&](int) {
      StateDict state;
      state["step"] = torch::tensor(7.F);
      state["count"] = torch::tensor(int64_t{3});
      state["flag"] = torch::tensor(true);
      if (async) {
        const dcp::AsyncSave saving = dcp::async_save(state, folder.path("c"));
        for (auto& [key, value] : state)
          value.to_tensor().zero_();  // the values are those at the call
        saving.wait();
      } else {
        dcp::save(state, folder.path("c"));
      }
      StateDict back = {{"step", torch::zeros({})},
                        {"count", torch::zeros({}, torch::kInt64)},
                        {"flag", torch::zeros({}, torch::kBool)}};
      dcp::load(back, folder.path("c"));
      EXPECT_EQ(back["step"].to_tensor().item<double>(), 7);
      EXPECT_EQ(back["count"].to_tensor().item<int64_t>(), 3);
      EXPECT_TRUE(back["flag"].to_tensor().item<bool>());
      EXPECT_EQ(back["step"].to_tensor().dim(), 0);
      dcp::finish_async_saves();
    });
  }
}

TEST(RoundTrip, LargeTensorsAreSplitAndStridesKept) {
  const TemporaryFolder folder;
  const torch::Tensor large = torch::randn({3, 9'000'000});  // 108 MB: pieces of a row and less
  const torch::Tensor transposed = torch::arange(24.).view({6, 4}).t();
  on_ranks(2, [&](int) {
    const DeviceMesh mesh = mesh_of({2});
    StateDict state = {{"large", chunk_tensor(large, mesh, {Shard(1)})},
                       {"t", chunk_tensor(transposed, mesh, {Shard(0)})}};
    dcp::save(state, folder.path("c"), {.threads = 2});
    StateDict back = {{"large", chunk_tensor(torch::zeros_like(large), mesh, {Shard(0)})},
                      {"t", chunk_tensor(torch::zeros({4, 6}), mesh, {Shard(1)})}};
    dcp::load(back, folder.path("c"), {.threads = 2});
    EXPECT_TRUE(torch::equal(full(back["large"].to_tensor()), large));
    EXPECT_TRUE(torch::equal(full(back["t"].to_tensor()), transposed));
  });
  for (const auto& entry : dcp::read_metadata(folder.path("c")).entries) {
    for (const auto& chunk : entry.chunks)
      EXPECT_LE(chunk.place.length, uint64_t{64} * 1024 * 1024 + 4096);
  }
}

TEST(RoundTrip, NeedsTwoBuffersBesideTheState) {
  const TemporaryFolder folder;
  on_ranks(2, [&](int) {
    CountingAllocator& allocator = CountingAllocator::install();
    const DeviceMesh mesh = mesh_of({2});
    const auto state_with = [&](int64_t dim) {
      return StateDict{{"w", chunk_tensor(torch::ones({6000, 8000}), mesh, {Shard(dim)})}};
    };
    StateDict by_columns = state_with(1), by_rows = state_with(0);  // 192 MB, as 96 MB a rank
    const size_t before = allocator.live_bytes();
    size_t peak = before;
    allocator.on_allocate = [&] { peak = std::max(peak, allocator.live_bytes()); };
    dcp::save(by_columns, folder.path("c"), {.threads = 1});
    dcp::load(by_rows, folder.path("c"), {.threads = 1});
    allocator.on_allocate = nullptr;
    EXPECT_LE(peak - before, size_t{2} * 64 * 1024 * 1024 + 1'000'000);
  });
}

/// One process without any group, of what four ranks saved; lists that grew.
TEST(RoundTrip, OneProcessReadsWhatFourSaved) {
  const TemporaryFolder folder;
  const std::string path = folder.path("c");
  on_ranks(4, [&](int rank) {
    StateDict state;
    state["W"] = chunk_tensor(counting({6, 3}, torch::kFloat32), mesh_of({4}), {Shard(0)});
    state["epoch"] = 7;
    state["name"] = "run-a";
    state["lr"] = 0.001;
    state["history"] = dcp::List{StateDict{{"loss", 2.0}}, StateDict{{"loss", 1.0}}};
    state["t"] = torch::tensor({2. * rank, 2. * rank + 1});  // differs: the first rank's counts
    dcp::save(state, path);
  });
  StateDict state = {{"W", torch::zeros({6, 3})},
                     {"epoch", 0},
                     {"name", ""},
                     {"lr", 0.},
                     {"history", dcp::List()},
                     {"t", torch::zeros({2}, torch::kFloat32)}};
  dcp::load(state, path);
  EXPECT_TRUE(torch::equal(state["W"].to_tensor(), counting({6, 3}, torch::kFloat32)));
  EXPECT_EQ(state["epoch"].to_int(), 7);
  EXPECT_EQ(state["name"].to_string(), "run-a");
  EXPECT_EQ(state["lr"].to_double(), 0.001);
  ASSERT_EQ(state["history"].items().size(), 2U);
  EXPECT_EQ(state["history"].items()[1].at("loss").to_double(), 1.0);
  EXPECT_TRUE(torch::equal(state["t"].to_tensor(), torch::tensor({0., 1.})));
  const StateDict all = dcp::load_everything(path);
  EXPECT_EQ(all.keys(), state.keys());
  EXPECT_EQ(all.at("W").to_tensor().sizes(), (std::vector<int64_t>{6, 3}));
}

struct Loader : dcp::Stateful {
  int64_t at = 0;
  std::vector<std::string> saved;
  StateDict state_dict() override { return {{"at", at}, {"seed", 5}}; }
  StateDict state_dict_to_load(const std::vector<std::string>& saved_keys) override {
    saved = saved_keys;
    return {{"at", 0}};
  }
  void load_state_dict(const StateDict& state) override { at = state.at("at").to_int(); }
};

TEST(RoundTrip, EveryRankMayHaveStateOfItsOwn) {
  const TemporaryFolder folder;
  on_ranks(3, [&](int rank) {
    const auto loader = std::make_shared<Loader>();
    loader->at = 10 + rank;
    const std::string key = "rank" + std::to_string(rank);
    StateDict state;
    state["loaders"][key] = loader;
    dcp::save(state, folder.path("c"));
    loader->at = 0;
    const auto report = dcp::load(state, folder.path("c"));
    EXPECT_EQ(loader->at, 10 + rank);
    EXPECT_EQ(loader->saved, (std::vector<std::string>{"at", "seed"}));
    EXPECT_EQ(report.unexpected.size(), 3U);  // the seeds
    EXPECT_EQ(state["loaders"][key].kind(), "Stateful");
  });
  EXPECT_EQ(dcp::load_one(folder.path("c"), "loaders.rank2.at").to_int(), 12);
}

TEST(RoundTrip, PartOfTheWorldMaySaveAlone) {
  const TemporaryFolder folder;
  on_ranks(4, [&](int rank) {
    const std::vector<int> ranks = rank < 2 ? std::vector<int>{0, 1} : std::vector<int>{2, 3};
    const ProcessGroup first = new_group({0, 1}), second = new_group({2, 3});
    const ProcessGroup mine = rank < 2 ? first : second;
    const std::string path = folder.path(rank < 2 ? "a" : "b");
    const DeviceMesh mesh = DeviceMesh::from_group(mine, torch::kCPU);
    StateDict state = {{"w", chunk_tensor(torch::full({5}, rank < 2 ? 1. : 2.), mesh, {Shard(0)})}};
    dcp::save(state, path, {.process_group = mine});
    StateDict back = {{"w", chunk_tensor(torch::zeros({5}), mesh, {Shard(0)})}};
    dcp::load(back, path, {.process_group = mine});
    EXPECT_TRUE(torch::equal(full(back["w"].to_tensor()), full(state["w"].to_tensor())));
  });
}

TEST(RoundTrip, ReplicatedValuesAreWrittenOnceAndSpread) {
  const TemporaryFolder folder;
  on_ranks(4, [&](int) {
    const DeviceMesh mesh = mesh_of({2, 2});
    StateDict state;
    for (int i = 0; i < 8; ++i) {
      state["plain" + std::to_string(i)] = torch::ones({1000});
      state["sharded" + std::to_string(i)] =
          chunk_tensor(torch::ones({2000}), mesh, {Replicate(), Shard(0)});
    }
    dcp::save(state, folder.path("c"), {.threads = 1});
  });
  std::map<std::string, uint64_t> bytes;
  for (const auto& entry : dcp::read_metadata(folder.path("c")).entries) {
    for (const auto& chunk : entry.chunks) bytes[chunk.place.file] += chunk.place.length;
  }
  ASSERT_EQ(bytes.size(), 4U);
  for (const auto& [file, size] : bytes) {
    EXPECT_EQ(size, std::filesystem::file_size(std::filesystem::path(folder.path("c")) / file));
    EXPECT_NEAR(static_cast<double>(size), 33'600, 4000) << file;
  }
}

}  // namespace
}  // namespace fsdp2::round_trip_test
