// Training runs: the same on any number of ranks, stopped together, failing together.

#include "train/trainer.h"

#include "support/errors.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "support/train_world.h"
#include "train/generate.h"
#include "train/init.h"
#include "train/model_dir.h"
#include "train/progress.h"
#include "train/step_bench.h"
#include "train/weights.h"

#include <fsdp2/collectives.h>

#include <torch/torch.h>

#include <csignal>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits>
#include <nlohmann/json.hpp>
#include <thread>
#include <unistd.h>

namespace fsdp2::train {
namespace {

using ::fsdp2::testing::on_processes;
using ::fsdp2::testing::on_world;
using ::fsdp2::testing::TemporaryFolder;
using testing::error_of;
using ::testing::HasSubstr;
using Json = nlohmann::json;

/// Text with something to learn in it.
std::string sentences(int count) {
  std::string text;
  for (int i = 0; i < count; ++i)
    text += "the number after " + std::to_string(i) + " is " + std::to_string(i + 1) + ".\n";
  return text;
}

TrainOptions small(const TemporaryFolder& folder) {
  TrainOptions options;
  // 3 kv rows of 2 heads, 67 words: nothing divides by the number of ranks.
  options.model = resolve(
      {.dim = 12, .layers = 2, .heads = 2, .kv_heads = 1, .ffn = 17, .vocab = 256, .seq = 16});
  options.data.paths = {folder.path("text")};
  options.batch = 12;
  options.schedule = {.peak = 1e-2, .warmup = 2, .steps = 6};
  options.val_batches = 2;
  return options;
}

std::vector<Json> lines_of(const std::string& path) {
  std::vector<Json> lines;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) lines.push_back(Json::parse(line));
  return lines;
}

TEST(Trainer, LearnsTheSameOnAnyNumberOfRanks) {
  TemporaryFolder folder;
  folder.write("text/a.txt", sentences(100));
  std::vector<std::vector<Json>> runs;
  for (const int ranks : {1, 2, 3, 4}) {
    const auto metrics = folder.path("metrics" + std::to_string(ranks));
    on_world(folder, ranks, [&](const World& world) {
      auto options = small(folder);
      options.batch = 12 / ranks;
      options.metrics = metrics;
      options.val_every = 3;
      const auto result = train(options, world);
      EXPECT_EQ(result.steps, 6);
      EXPECT_EQ(result.signal, 0);
    });
    runs.push_back(lines_of(metrics));
    ASSERT_EQ(runs.back().size(), 8) << ranks << " ranks";
    for (size_t i = 0; i < runs.back().size(); ++i) {
      for (const char* key : {"step", "loss", "grad_norm", "lr", "validation_loss", "tokens"}) {
        ASSERT_EQ(runs.back()[i].contains(key), runs[0][i].contains(key)) << key;
        if (!runs[0][i].contains(key)) continue;
        const double expected = runs[0][i][key];
        EXPECT_NEAR(runs.back()[i][key].get<double>(), expected, 1e-4 * expected)
            << key << " of line " << i << " on " << ranks << " ranks";
      }
    }
  }
  EXPECT_NEAR(runs[0][0]["loss"].get<double>(), std::log(256), 0.1);
  EXPECT_LT(runs[0].back()["validation_loss"].get<double>(), 5.3);
}

TEST(Trainer, AccumulatesMicroBatches) {
  TemporaryFolder folder;
  folder.write("text/a.txt", sentences(100));
  on_world(folder, 1, [&](const World& world) {
    auto options = small(folder);
    options.schedule.steps = 2;
    options.metrics = folder.path("whole");
    train(options, world);
    options.batch = 4;
    options.accum = 3;
    options.val_batches = 6;
    options.metrics = folder.path("parts");
    train(options, world);
  });
  const auto whole = lines_of(folder.path("whole")), parts = lines_of(folder.path("parts"));
  ASSERT_EQ(whole.size(), parts.size());
  EXPECT_NEAR(parts[0]["loss"].get<double>(), whole[0]["loss"].get<double>(), 1e-5);
  EXPECT_NEAR(parts[1]["loss"].get<double>(), whole[1]["loss"].get<double>(), 1e-4);
  EXPECT_EQ(parts[0]["tokens"], whole[0]["tokens"]);
}

TEST(Trainer, SavesAModelThatLoadsAndContinuesText) {
  TemporaryFolder folder;
  folder.write("text/a.txt", sentences(100));
  on_world(folder, 3, [&](const World& world) {
    auto options = small(folder);
    options.batch = 4;
    options.schedule = {.peak = 2e-2, .warmup = 2, .steps = 40};
    options.out = folder.path("deep/out");
    train(options, world);
  });
  EXPECT_FALSE(std::filesystem::exists(folder.path("deep/out/model.safetensors.tmp")));
  EXPECT_FALSE(std::filesystem::exists(folder.path("deep/out/config.json.tmp")));
  on_processes(1, [&](int) {
    auto model = load_model(folder.path("deep/out"));
    EXPECT_EQ(model->config().kv_heads, 1);
    const auto made = generate(model, "the num", {.tokens = 20, .temperature = 0});
    EXPECT_THAT(made, HasSubstr("er")) << made;
    EXPECT_EQ(generate(model, "the num", {.tokens = 20, .top_k = 1, .seed = 3}), made);
    const SampleOptions sample{.tokens = 30, .temperature = 1.5, .seed = 3};
    std::string emitted;
    const auto random = generate(model, "", sample, [&](char byte) { emitted.push_back(byte); });
    EXPECT_EQ(random, emitted);
    EXPECT_EQ(generate(model, "", sample), random);
    EXPECT_THAT(error_of([&] { generate(model, "", {.temperature = -1}); }),
                HasSubstr("temperature"));
  });
}

TEST(Trainer, StopsAllRanksAfterTheSameStepAndSaves) {
  TemporaryFolder folder;
  folder.write("text/a.txt", sentences(100));
  on_world(folder, 2, [&](const World& world) {
    auto options = small(folder);
    options.schedule.steps = 1'000'000;
    options.out = folder.path("out");
    options.metrics = folder.path("metrics");
    options.log_every = 1'000'000;
    std::thread sender;
    if (world.rank() == 1) {
      sender = std::thread([&] {
        while (lines_of(folder.path("metrics")).size() < 5)
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
        ::kill(::getpid(), SIGTERM);
      });
    }
    const auto result = train(options, world);
    if (sender.joinable()) sender.join();
    EXPECT_EQ(result.signal, SIGTERM);
    EXPECT_GE(result.steps, 5);
    for (const auto& steps : all_gather_bytes(std::to_string(result.steps), world_group())) {
      EXPECT_EQ(steps, std::to_string(result.steps));
    }
  });
  EXPECT_EQ(safetensors::Reader(folder.path("out/model.safetensors")).entries().size(), 21);
}

TEST(Trainer, AStrangeLossIsAnErrorOnAllRanksThatNamesTheStep) {
  TemporaryFolder folder;
  folder.write("text/a.txt", sentences(100));
  on_world(folder, 2, [&](const World& world) {
    auto options = small(folder);
    options.schedule = {.peak = 1e30, .warmup = 0, .steps = 10};
    options.out = folder.path("out");
    const auto error = error_of([&] { train(options, world); });
    EXPECT_THAT(error, ::testing::ContainsRegex("not finite at step [23]")) << error;
  });
  EXPECT_FALSE(std::filesystem::exists(folder.path("out/model.safetensors")));
}

TEST(Trainer, WhatOneRankCannotReadIsAnErrorOnAll) {
  TemporaryFolder folder;
  folder.write("text/a.txt", sentences(100));
  on_world(folder, 3, [&](const World& world) {
    auto options = small(folder);
    if (world.rank() == 1) options.data.paths = {folder.path("none")};
    EXPECT_THAT(error_of([&] { train(options, world); }),
                HasSubstr("cannot start training: rank 1: data: there is no file or folder"));
    options = small(folder);
    options.accum = 0;
    EXPECT_THAT(error_of([&] { train(options, world); }),
                HasSubstr("accum must be at least 1, got 0"));
    options = small(folder);
    options.metrics = folder.path("none/metrics");
    EXPECT_THAT(error_of([&] { train(options, world); }),
                HasSubstr("rank 0: cannot write the metrics file"));
    options = small(folder);
    options.out = folder.path("text/a.txt");
    EXPECT_THAT(error_of([&] { train(options, world); }), HasSubstr("a.txt"));
  });
}

TEST(Weights, FailToSaveOnAllRanks) {
  TemporaryFolder folder;
  on_world(folder, 2, [&](const World&) {
    Llama model(small(folder).model);
    EXPECT_THAT(error_of([&] { save_weights(*model, folder.path("none/w")); }),
                HasSubstr("rank 0: cannot create " + folder.path("none/w")));
  });
}

TEST(Weights, AreCheckedBeforeAnyIsLoaded) {
  TemporaryFolder folder;
  on_processes(1, [&](int) {
    Llama model(resolve({.dim = 4, .layers = 1, .heads = 1, .vocab = 5, .seq = 4}));
    init_weights(*model, 1, 1);
    std::vector<std::pair<std::string, torch::Tensor>> tensors;
    for (const auto& item : model->named_parameters())
      tensors.emplace_back(item.key(), torch::zeros_like(item.value()));
    const auto loading = [&](const auto& changed) {
      safetensors::save(folder.path("w"), changed);
      return error_of([&] { load_weights(*model, folder.path("w")); });
    };
    auto changed = tensors;
    changed.pop_back();
    EXPECT_THAT(loading(changed), HasSubstr("lacks output.weight"));
    changed = tensors;
    changed.back().second = torch::ones({5, 3});
    EXPECT_THAT(loading(changed),
                HasSubstr("output.weight: its size is [5, 4] in the state, [5, 3] in the file"));
    changed.back().second = torch::ones({5, 4}, torch::kFloat64);
    EXPECT_THAT(loading(changed),
                HasSubstr("output.weight: converting it from float64 to float32 would round"));
    EXPECT_GT(model->tok_embeddings->weight.norm().item<double>(), 0);
    EXPECT_EQ(loading(tensors), "");
    EXPECT_EQ(model->tok_embeddings->weight.norm().item<double>(), 0);
    changed = tensors;
    changed.emplace_back("more", torch::ones(1));
    EXPECT_THAT(loading(changed), HasSubstr("w: the model has no parameter called more"));
  });
}

TEST(ModelFolder, SaysWhatIsWrongWithIt) {
  TemporaryFolder folder;
  EXPECT_THAT(error_of([&] { load_model(folder.path("none")); }),
              HasSubstr("is " + folder.path("none") + " a folder"));
  folder.write("config.json", "{");
  EXPECT_THAT(error_of([&] { load_model(folder.path()); }), HasSubstr("config.json: "));
  folder.write("config.json", R"({"model_type":"gpt2"})");
  EXPECT_THAT(error_of([&] { load_model(folder.path()); }),
              HasSubstr("config.json: model_type is \"gpt2\""));
}

StepBenchOptions small_bench() {
  StepBenchOptions options;
  options.model = resolve(
      {.dim = 12, .layers = 2, .heads = 2, .kv_heads = 1, .ffn = 17, .vocab = 67, .seq = 8});
  options.batch = 3;
  options.steps = 4;
  options.warmup = 1;
  options.norm_impl = "fp64";
  return options;
}

TEST(StepBench, ShardedOnOneRankIsBitIdenticalToUnsharded) {
  on_processes(1, [&](int) {
    auto options = small_bench();
    const auto sharded = run_step_bench(options).value();
    options.mode = "local";
    const auto plain = run_step_bench(options).value();
    EXPECT_EQ(sharded["losses"], plain["losses"]);
    EXPECT_EQ(sharded["grad_norms"], plain["grad_norms"]);
    EXPECT_EQ(sharded["final_checksums"], plain["final_checksums"]);
  });
}

TEST(StepBench, ReportsWhatItDid) {
  TemporaryFolder folder;
  on_processes(1, [&](int) {
    auto options = small_bench();
    options.mode = "local";
    options.local_world = 2;
    options.accum = 2;
    options.dump_init = folder.path("init");
    options.dump_final = folder.path("final");
    const auto first = run_step_bench(options).value();
    EXPECT_EQ(first["losses"].size(), 5);
    EXPECT_EQ(first["step_ms"].size(), 4);
    EXPECT_EQ(first["tokens_per_step"], 2 * 2 * 3 * 8);
    EXPECT_EQ(first["config"]["kv_heads"], 1);
    EXPECT_GT(first["peak_rss_mib_max"], 1);
    const safetensors::Reader last(folder.path("final"));
    const auto norm = last.read("norm.weight").to(torch::kFloat64);
    EXPECT_NEAR(first["final_checksums"]["norm.weight"][0].get<double>(), norm.sum().item<double>(),
                1e-9);
    options.load_init = folder.path("init");
    options.dump_init.clear();
    EXPECT_EQ(run_step_bench(options).value()["losses"], first["losses"]);
  });
}

TEST(Progress, WritesTimesAsAClock) {
  EXPECT_EQ(clock_text(0.4), "0:00");
  EXPECT_EQ(clock_text(65), "1:05");
  EXPECT_EQ(clock_text(3725), "1:02:05");
}

}  // namespace
}  // namespace fsdp2::train
