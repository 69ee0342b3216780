#pragma once

// The random state and autocast under which a function ran, to run it again alike.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace fsdp2::recompute {

class Surroundings {
 public:
  /// Those of now. Random states of the CPU, of the tensors' devices and of the current device, if
  /// asked for.
  Surroundings(const std::vector<at::Tensor>& tensors, bool random_states);
  Surroundings(const Surroundings&) = delete;
  Surroundings& operator=(const Surroundings&) = delete;

  /// Brings them back for as long as it lives.
  class Restored;
  /// Those of now, of what this one knows.
  std::unique_ptr<Surroundings> of_now() const;
  void restore() const;

 private:
  struct Random {
    at::Generator generator;
    at::Tensor state;
  };
  struct Autocast {
    at::DeviceType device;
    bool enabled;
    at::ScalarType dtype;
  };
  explicit Surroundings(const Surroundings& like, int);  // those of now, of what `like` knows

  std::vector<Random> random_;
  std::vector<Autocast> autocast_;
  bool autocast_cache_ = true;
};

class Surroundings::Restored {
 public:
  explicit Restored(const Surroundings& wanted);
  Restored(const Restored&) = delete;
  Restored& operator=(const Restored&) = delete;
  ~Restored();

 private:
  Surroundings before_;
};

}  // namespace fsdp2::recompute
