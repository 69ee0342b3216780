#include "train/trainer.h"

#include "train/init.h"
#include "train/model_dir.h"
#include "train/progress.h"
#include "train/step_trace.h"
#include "train/stop_signal.h"

#include <fsdp2/clip_grad.h>
#include <fsdp2/optim.h>

#include <ATen/record_function.h>
#include <torch/torch.h>

#include <cmath>
#include <csignal>
#include <filesystem>

namespace fsdp2::train {
namespace {

void check(const TrainOptions& options) {
  const std::pair<const char*, int64_t> at_least_one[] = {{"batch", options.batch},
                                                          {"accum", options.accum},
                                                          {"steps", options.schedule.steps},
                                                          {"val-batches", options.val_batches},
                                                          {"log-every", options.log_every}};
  for (const auto& [name, value] : at_least_one) {
    TORCH_CHECK_VALUE(value >= 1, name, " must be at least 1, got ", value);
  }
  const std::pair<const char*, double> not_negative[] = {{"lr", options.schedule.peak},
                                                         {"weight-decay", options.weight_decay},
                                                         {"clip", options.clip},
                                                         {"warmup", options.schedule.warmup},
                                                         {"val-every", options.val_every}};
  for (const auto& [name, value] : not_negative) {
    TORCH_CHECK_VALUE(value >= 0 && std::isfinite(value), name, " must not be negative, got ",
                      value);
  }
}

class Trainer {
 public:
  Trainer(const TrainOptions& options, const World& world) : options_(options), world_(world) {}

  TrainResult run();

 private:
  struct Reduced {
    double loss = 0;
    int signal = 0;
  };

  void prepare();
  void make_optimizer();
  void set_lr(double lr);
  /// Forward and backward of all micro-batches; the mean over ranks. Error on all ranks if a loss
  /// is not finite.
  Reduced accumulate(int64_t step);
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& y);
  double validate();

  const TrainOptions& options_;
  const World& world_;
  LlamaConfig config_;
  int64_t seq_ = 0;
  nlohmann::ordered_json fields_;  // of the config.json of `from`
  std::unique_ptr<Dataset> data_;
  std::unique_ptr<Progress> progress_;
  Llama model_{nullptr};
  std::vector<torch::Tensor> parameters_;
  std::unique_ptr<optim::AdamW> optimizer_;
};

void Trainer::prepare() {
  agree("cannot start training", [&] {
    check(options_);
    check(options_.sharding, world_.size());
    config_ = options_.from.empty() ? options_.model : read_config(options_.from);
    if (!options_.from.empty()) fields_ = read_hf_config(options_.from);
    seq_ = options_.seq > 0 ? options_.seq : config_.seq;
    TORCH_CHECK_VALUE(seq_ <= config_.seq, "seq is ", seq_, ", but the model takes ", config_.seq,
                      " tokens at most");
    auto data = options_.data;
    data.seq = seq_;
    data.vocab = config_.vocab;
    data.seed = options_.seed;
    data_ = std::make_unique<Dataset>(data);
    if (!options_.out.empty()) std::filesystem::create_directories(options_.out);
    if (!options_.out.empty() && !options_.from.empty() && world_.rank() == 0) {
      copy_tokenizer(options_.from, options_.out);
    }
    progress_ =
        std::make_unique<Progress>(world_.rank() == 0, options_.schedule.steps, options_.log_every,
                                   options_.metrics, data_->is_text() ? "byte" : "token");
    if (!options_.from.empty()) return;
    model_ = Llama(config_);
    init_weights(*model_, options_.seed, config_.layers);
  });
  if (options_.from.empty()) {
    shard(model_, options_.sharding);
  } else {
    model_ = load_model(options_.from, options_.sharding);
  }
  parameters_ = model_->parameters();
  make_optimizer();

  int64_t count = 0;
  for (const auto& parameter : parameters_) count += parameter.numel();
  progress_->note("training " + std::to_string(count) + " parameters on " +
                  std::to_string(world_.size()) + (world_.size() == 1 ? " rank; " : " ranks; ") +
                  std::to_string(data_->documents()) + " documents, " +
                  std::to_string(data_->train_size()) + (data_->is_text() ? " bytes" : " tokens") +
                  " to train on and " + std::to_string(data_->validation_size()) + " held out");
}

void Trainer::make_optimizer() {
  std::vector<torch::Tensor> matrices, vectors;
  for (const auto& parameter : parameters_)
    (parameter.dim() >= 2 ? matrices : vectors).push_back(parameter);
  const auto options = [](double weight_decay) {
    return std::make_unique<torch::optim::AdamWOptions>(
        torch::optim::AdamWOptions().betas({0.9, 0.95}).eps(1e-8).weight_decay(weight_decay));
  };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(matrices, options(options_.weight_decay));
  groups.emplace_back(vectors, options(0));
  optimizer_ = std::make_unique<optim::AdamW>(std::move(groups));
}

void Trainer::set_lr(double lr) {
  for (auto& group : optimizer_->param_groups()) group.options().set_lr(lr);
}

torch::Tensor Trainer::forward(const torch::Tensor& x, const torch::Tensor& y) {
  RECORD_USER_SCOPE("forward");
  return next_token_loss(model_, x, y) / options_.accum;
}

Trainer::Reduced Trainer::accumulate(int64_t step) {
  double mean = 0;
  for (int64_t k = 0; k < options_.accum; ++k) {
    const auto [x, y] =
        data_->train_batch(step * options_.accum + k, world_.rank(), world_.size(), options_.batch);
    before_micro_batch(model_, options_.sharding, k, options_.accum);
    const auto loss = forward(x, y);
    {
      RECORD_USER_SCOPE("backward");
      loss.backward();
    }
    mean += loss.item<double>();
  }
  const int signal = StopSignal::received();
  // One small all-reduce carries all that the ranks have to agree on.
  std::vector<double> sums{mean, std::isfinite(mean) ? 0.0 : 1.0, signal == SIGTERM ? 1.0 : 0.0,
                           signal == SIGINT ? 1.0 : 0.0};
  sum_over_ranks(sums);
  TORCH_CHECK(sums[1] == 0, "the loss is not finite at step ", step + 1, " on ", sums[1], " of ",
              world_.size(), " ranks; try a lower learning rate, a longer warm-up or clipping");
  return {sums[0] / world_.size(), sums[2] > 0 ? SIGTERM : sums[3] > 0 ? SIGINT : 0};
}

double Trainer::validate() {
  const torch::NoGradGuard no_grad;
  const int64_t count =
      data_->validation_batches(options_.val_batches, world_.size(), options_.batch);
  std::vector<double> sum{0};
  for (int64_t i = 0; i < count; ++i) {
    const auto [x, y] =
        data_->validation_batch(i, count, world_.rank(), world_.size(), options_.batch);
    sum[0] += next_token_loss(model_, x, y).item<double>();
  }
  sum_over_ranks(sum);
  return sum[0] / static_cast<double>(count * world_.size());
}

TrainResult Trainer::run() {
  const auto& schedule = options_.schedule;
  StepTrace trace(options_.trace, world_, std::min(kTraceFrom, schedule.steps - 1), kTracedSteps);
  prepare();
  const StopSignal stop_signal;
  TrainResult result;
  while (result.steps < schedule.steps && result.signal == 0) {
    const double lr = schedule.at(result.steps);
    set_lr(lr);
    trace.begin(result.steps);
    const auto [loss, signal] = accumulate(result.steps);
    const double norm = clip_grad_norm_(parameters_, options_.clip > 0 ? options_.clip : INFINITY);
    TORCH_CHECK(std::isfinite(norm), "the gradient norm is not finite at step ", result.steps + 1,
                "; try a lower learning rate or a longer warm-up");
    optimizer_->step();
    optimizer_->zero_grad();
    trace.end(result.steps);
    ++result.steps;
    progress_->step(
        {result.steps, loss, norm, lr, options_.batch * options_.accum * seq_ * world_.size()});
    result.signal = result.steps < schedule.steps ? signal : 0;
    const bool validate_now = options_.val_every > 0 && result.steps % options_.val_every == 0;
    if (result.signal == 0 && (validate_now || result.steps == schedule.steps)) {
      result.validation_loss = validate();
      progress_->validation(result.steps, result.validation_loss);
    }
  }
  trace.finish();
  if (!trace.written().empty()) progress_->note("wrote a trace to " + trace.written());
  if (result.signal != 0) {
    progress_->note("stopped after step " + std::to_string(result.steps) + " by " +
                    (result.signal == SIGTERM ? "SIGTERM" : "SIGINT"));
  }
  if (!options_.out.empty()) {
    save_model(model_, options_.out, {.dtype = options_.out_dtype, .fields = fields_});
    progress_->note("wrote the model to " + options_.out);
  }
  return result;
}

}  // namespace

TrainResult train(const TrainOptions& options, const World& world) {
  return Trainer(options, world).run();
}

}  // namespace fsdp2::train
