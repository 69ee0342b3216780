#include "train/step_bench.h"

#include "train/init.h"
#include "train/process_stats.h"
#include "train/step_trace.h"
#include "train/tokens.h"
#include "train/weights.h"
#include "train/world.h"

#include <fsdp2/clip_grad.h>
#include <fsdp2/collectives.h>
#include <fsdp2/dtensor.h>
#include <fsdp2/optim.h>
#include <fsdp2/replicate.h>

#include <ATen/record_function.h>
#include <torch/torch.h>

#include <array>
#include <chrono>
#include <cmath>
#include <limits>
#include <thread>

namespace fsdp2::train {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

/// The value below which the given fraction of sorted `values` lies.
double quantile(const std::vector<double>& values, double fraction) {
  return values[std::min(values.size() - 1, static_cast<size_t>(fraction * values.size()))];
}

torch::Tensor local_part(const torch::Tensor& tensor) {
  return is_dtensor(tensor) ? DTensor(tensor).to_local() : tensor;
}

class StepBench {
 public:
  StepBench(const StepBenchOptions& options, const World& world)
      : options_(options),
        world_(world),
        sharded_(options.mode == "fsdp2"),
        together_(options.mode != "local") {}

  Json run();

 private:
  enum Phase { kForward, kBackward, kGradNorm, kOptimizer, kZero, kPhases };
  struct Step {
    double loss = 0, norm = 0;
    std::array<double, kPhases> ms{};
  };

  void build();
  Batch batch(int64_t micro) const;
  Step step(const std::vector<Batch>& batches);
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& y);
  double grad_norm();
  void synchronize() const {
    if (world_.size() > 1) wait(barrier(world_group()), "barrier before a step");
  }
  Json checksums() const;
  Json config() const;
  Json report(const std::vector<Step>& steps, std::vector<double> times) const;

  const StepBenchOptions& options_;
  const World& world_;
  const bool sharded_, together_;  // the parameters; the ranks
  Llama model_{nullptr};
  std::vector<torch::Tensor> parameters_;
  std::unique_ptr<optim::AdamW> optimizer_;
  std::optional<ReplicatedModule> replica_;
  std::optional<Sharded<LlamaImpl>> call_;  // if what it returns is cast

  double build_s_ = 0;
  int64_t base_kib_ = 0, init_peak_kib_ = 0;
  bool peak_was_reset_ = false;
  Json init_checksums_, tokens_head_;
  CollectiveCounts first_step_;
};

void StepBench::build() {
  base_kib_ = memory_stats().resident;
  const auto start = Clock::now();
  agree("making the model", [&] {
    model_ = Llama(options_.model);
    if (options_.load_init.empty()) init_weights(*model_, options_.seed, options_.model.layers);
  });
  if (!options_.load_init.empty()) load_weights(*model_, options_.load_init);
  if (!options_.dump_init.empty()) save_weights(*model_, options_.dump_init);
  if (sharded_) {
    shard(model_, options_.sharding);
    if (!options_.sharding.output_dtype.empty()) call_ = boundary(model_);
  } else if (together_) {
    replica_ = replicate(model_);
  }
  parameters_ = model_->parameters();
  optimizer_ = std::make_unique<optim::AdamW>(
      parameters_,
      torch::optim::AdamWOptions(options_.lr).betas({0.9, 0.95}).eps(1e-8).weight_decay(0.1));
  build_s_ = ms_since(start) / 1e3;
  init_checksums_ = checksums();
}

Batch StepBench::batch(int64_t micro) const {
  const auto of_rank = [&](int64_t rank) {
    return synthetic_batch(options_.seed, micro, rank, options_.batch, options_.model.seq,
                           options_.model.vocab);
  };
  if (together_ || options_.local_replicas) return of_rank(world_.rank());
  std::vector<torch::Tensor> x, y;
  for (int64_t rank = 0; rank < options_.local_world; ++rank) {
    auto part = of_rank(rank);
    x.push_back(part.x);
    y.push_back(part.y);
  }
  return {torch::cat(x), torch::cat(y)};
}

double StepBench::grad_norm() {
  if (options_.norm_impl == "off") return std::numeric_limits<double>::quiet_NaN();
  if (options_.norm_impl != "fp64") {
    return clip_grad_norm_(parameters_, options_.clip > 0 ? options_.clip : INFINITY);
  }
  torch::NoGradGuard no_grad;
  std::vector<torch::Tensor> grads;
  std::vector<double> square{0};
  for (const auto& parameter : parameters_) {
    grads.push_back(local_part(parameter.grad()));
    const double norm =
        torch::linalg_vector_norm(grads.back(), 2, {}, false, torch::kFloat64).item<double>();
    square[0] += norm * norm;
  }
  if (sharded_) sum_over_ranks(square);
  const double norm = std::sqrt(square[0] / (sharded_ ? options_.sharding.replicate : 1));
  const double scale = options_.clip > 0 ? options_.clip / (norm + 1e-6) : 1;
  if (scale < 1) {
    for (auto& grad : grads) grad.mul_(scale);
  }
  return norm;
}

torch::Tensor StepBench::forward(const torch::Tensor& x, const torch::Tensor& y) {
  RECORD_USER_SCOPE("forward");
  const auto loss = call_ ? next_token_loss((*call_)(x), y) : next_token_loss(model_, x, y);
  return options_.accum > 1 ? loss / options_.accum : loss;
}

StepBench::Step StepBench::step(const std::vector<Batch>& batches) {
  Step done;
  auto start = Clock::now();
  const auto lap = [&](Phase phase) {
    done.ms[phase] += ms_since(start);
    start = Clock::now();
  };
  for (size_t i = 0; i < batches.size(); ++i) {
    if (replica_) replica_->set_requires_gradient_sync(i + 1 == batches.size());
    if (sharded_) before_micro_batch(model_, options_.sharding, i, batches.size());
    const auto& [x, y] = batches[i];
    const torch::Tensor loss = forward(x, y);
    lap(kForward);
    {
      RECORD_USER_SCOPE("backward");
      loss.backward();
    }
    lap(kBackward);
    done.loss += loss.item<double>();
  }
  done.norm = grad_norm();
  lap(kGradNorm);
  optimizer_->step();
  lap(kOptimizer);
  optimizer_->zero_grad(/*set_to_none=*/true);
  lap(kZero);
  return done;
}

Json StepBench::checksums() const {
  torch::NoGradGuard no_grad;
  const auto named = model_->named_parameters();
  std::vector<double> sums;
  for (const auto& item : named) {
    const auto local = local_part(item.value()).to(torch::kFloat64);
    sums.push_back(local.sum().item<double>());
    sums.push_back((local * local).sum().item<double>());
  }
  if (sharded_) sum_over_ranks(sums);
  Json json = Json::object();
  for (size_t i = 0; i < named.size(); ++i) json[named[i].key()] = {sums[2 * i], sums[2 * i + 1]};
  return json;
}

Json StepBench::run() {
  StepTrace trace(options_.trace, world_, options_.warmup, std::min(options_.steps, kTracedSteps));
  build();
  std::vector<Step> steps;
  std::vector<double> times;
  for (int64_t i = 0; i < options_.warmup + options_.steps; ++i) {
    std::vector<Batch> batches;
    batches.reserve(options_.accum);
    for (int64_t k = 0; k < options_.accum; ++k) {
      batches.push_back(batch((options_.start_step + i) * options_.accum + k));
    }
    if (i == 0) {
      for (const auto& token : batches[0]
                                   .x.flatten()
                                   .narrow(0, 0, std::min<int64_t>(8, batches[0].x.numel()))
                                   .unbind()) {
        tokens_head_.push_back(token.item<int64_t>());
      }
    }
    if (i == options_.warmup) {
      init_peak_kib_ = memory_stats().peak;
      peak_was_reset_ = reset_peak();
    }
    trace.begin(i);
    synchronize();
    if (i == 0) reset_collective_counts();
    const auto start = Clock::now();
    steps.push_back(step(batches));
    if (i >= options_.warmup) times.push_back(ms_since(start));
    if (i == 0) first_step_ = collective_counts();
    trace.end(i);
  }
  auto json = report(steps, std::move(times));
  if (!trace.written().empty()) json["trace"] = trace.written();
  if (!options_.dump_final.empty()) save_weights(*model_, options_.dump_final);
  return json;
}

Json StepBench::config() const {
  const auto& m = options_.model;
  Json config = {{"mode", options_.mode},
                 {"preset", options_.preset},
                 {"dim", m.dim},
                 {"layers", m.layers},
                 {"heads", m.heads},
                 {"kv_heads", m.kv_heads},
                 {"ffn", m.ffn},
                 {"vocab", m.vocab},
                 {"seq", m.seq},
                 {"tied", m.tied},
                 {"batch", options_.batch},
                 {"steps", options_.steps},
                 {"warmup", options_.warmup},
                 {"lr", options_.lr},
                 {"seed", options_.seed},
                 {"accum", options_.accum},
                 {"clip", options_.clip},
                 {"norm_impl", options_.norm_impl},
                 {"local_world", options_.local_world},
                 {"local_replicas", options_.local_replicas},
                 {"threads", options_.threads},
                 {"start_step", options_.start_step},
                 {"world", world_.size()},
                 {"dp", together_ ? world_.size() : 1}};
  config.update(to_json(options_.sharding));
  return config;
}

Json StepBench::report(const std::vector<Step>& steps, std::vector<double> times) const {
  const auto memory = memory_stats();
  Json mine = {{"rank", world_.rank()},
               {"mem",
                {{"rss_base_kib", base_kib_},
                 {"rss_end_kib", memory.resident},
                 {"hwm_kib", std::max(memory.peak, init_peak_kib_)},
                 {"hwm_init_kib", init_peak_kib_}}},
               {"step_ms", times}};
  if (peak_was_reset_) mine["mem"]["hwm_steps_kib"] = memory.peak;
  Json losses = Json::array(), norms = Json::array();
  std::vector<double> mean;
  for (const auto& step : steps) {
    losses.push_back(step.loss);
    norms.push_back(step.norm);
    mean.push_back(step.loss);
  }
  mine["loss_local"] = losses;
  if (together_) {
    sum_over_ranks(mean);
    for (auto& loss : mean) loss /= world_.size();
  }

  Json per_rank = Json::array();
  double peak = 0, steps_peak = 0;
  const auto reports = world_.size() > 1 ? all_gather_bytes(mine.dump(), world_group())
                                         : std::vector<std::string>{mine.dump()};
  for (const auto& text : reports) {
    auto rank = Json::parse(text);
    const auto theirs = rank["step_ms"].get<std::vector<double>>();
    for (size_t i = 0; i < times.size(); ++i) times[i] = std::max(times[i], theirs[i]);
    peak = std::max(peak, rank["mem"]["hwm_kib"].get<double>());
    steps_peak = std::max(steps_peak, rank["mem"].value("hwm_steps_kib", 0.0));
    rank.erase("step_ms");
    if (!theirs.empty()) rank["step_ms_median"] = median(theirs);
    per_rank.push_back(std::move(rank));
  }

  int64_t count = 0;
  for (const auto& parameter : parameters_) count += parameter.numel();
  const int64_t copies = together_                 ? world_.size()
                         : options_.local_replicas ? 1
                                                   : options_.local_world;
  const int64_t tokens = options_.batch * options_.model.seq * options_.accum * copies;
  Json json = {{"config", config()},
               {"env",
                {{"torch", TORCH_VERSION},
                 {"ncpu", std::thread::hardware_concurrency()},
                 {"threads", torch::get_num_threads()}}},
               {"params", count},
               {"tokens_head_step0_rank0", tokens_head_},
               {"build_s", build_s_},
               {"losses", mean},
               {"grad_norms", norms},
               {"step_ms", times},
               {"tokens_per_step", tokens}};
  if (!times.empty()) {
    auto sorted = times;
    std::sort(sorted.begin(), sorted.end());
    json["step_ms_median"] = median(sorted);
    json["step_ms_p10"] = quantile(sorted, 0.1);
    json["step_ms_p90"] = quantile(sorted, 0.9);
    json["step_ms_min"] = sorted.front();
    json["tokens_per_s"] = tokens / median(sorted) * 1e3;
    const char* names[kPhases] = {"forward", "backward", "gradnorm", "optim", "zero"};
    for (int phase = 0; phase < kPhases; ++phase) {
      std::vector<double> ms;
      for (size_t i = options_.warmup; i < steps.size(); ++i) ms.push_back(steps[i].ms[phase]);
      json["phases_ms_median"][names[phase]] = median(ms);
    }
  }
  if (sharded_) {
    json["collectives_one_step"] = {{"calls",
                                     {{"all_gather", first_step_.all_gathers},
                                      {"reduce_scatter", first_step_.reduce_scatters},
                                      {"all_reduce", first_step_.all_reduces},
                                      {"broadcast", first_step_.broadcasts},
                                      {"other", first_step_.others}}},
                                    {"bytes", first_step_.bytes}};
    json["all_gathers"] = first_step_.all_gathers;
    json["reduce_scatters"] = first_step_.reduce_scatters;
  }
  json["per_rank"] = per_rank;
  json["peak_rss_mib_max"] = peak / 1024;
  json["peak_rss_steps_mib_max"] = steps_peak / 1024;
  json["init_checksums"] = init_checksums_;
  json["final_checksums"] = checksums();
  return json;
}

void check(const StepBenchOptions& options, const World& world) {
  const std::pair<const char*, int64_t> counts[] = {{"--batch", options.batch},
                                                    {"--accum", options.accum},
                                                    {"--local-world", options.local_world}};
  for (const auto& [name, value] : counts) {
    TORCH_CHECK_VALUE(value >= 1, name, " must be at least 1, got ", value);
  }
  TORCH_CHECK_VALUE(options.steps >= 0 && options.warmup >= 0 && options.steps + options.warmup > 0,
                    "--steps and --warmup: at least one step is needed");
  TORCH_CHECK_VALUE(options.mode != "local" || world.size() == 1 || options.local_replicas,
                    "local mode is one process, but there are ", world.size(),
                    " ranks: pass --local-replicas true to train a copy on each");
  if (options.mode == "fsdp2") check(options.sharding, world.size());
}

}  // namespace

std::optional<Json> run_step_bench(const StepBenchOptions& options) {
  TORCH_CHECK_VALUE(options.threads >= 1, "--threads must be at least 1, got ", options.threads);
  torch::set_num_threads(options.threads);
  const World world;
  check(options, world);
  auto report = StepBench(options, world).run();
  if (world.rank() != 0) return std::nullopt;
  return report;
}

}  // namespace fsdp2::train
