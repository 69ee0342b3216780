#pragma once

// What trainers do with the world: join it, shard a model over it, reduce a few numbers, agree on
// errors.

#include <fsdp2/mixed_precision.h>
#include <fsdp2/process_group.h>

#include <functional>
#include <string>
#include <vector>

namespace fsdp2::train {

/// Joins the world that the environment describes and leaves it at the end of the scope.
class World {
 public:
  explicit World(const InitOptions& options = {});
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

 private:
  int rank_, size_;
};

/// Compute threads of this process; 0 leaves OMP_NUM_THREADS if that is set, else shares the cores
/// among the ranks of this host.
void set_threads(int threads);

/// "fp32", "bf16" or "fp16".
torch::ScalarType dtype_of(const std::string& name);
/// Parameters and gradients travel as these; fp32 parameters as they are.
MixedPrecisionPolicy precision(const std::string& param_dtype, const std::string& reduce_dtype);

/// Runs `body` on every rank; if it throws on any, throws on all, naming the first rank that
/// failed. Collective.
void agree(const std::string& what, const std::function<void()>& body);

/// Sum over all ranks, of float64 values; in place. Collective.
void sum_over_ranks(std::vector<double>& values);

}  // namespace fsdp2::train
