#pragma once

// A CPU allocator that knows what is alive; put in place for the rest of the process.

#include <c10/core/CPUAllocator.h>

#include <functional>
#include <map>
#include <mutex>
#include <unordered_map>

namespace fsdp2::testing {

class CountingAllocator final : public c10::Allocator {
 public:
  /// Takes over from torch's allocator. Call in a rank's process.
  static CountingAllocator& install() {
    static auto* allocator = [] {
      auto* made = new CountingAllocator(c10::GetCPUAllocator());
      c10::SetCPUAllocator(made, /*priority=*/1);
      return made;
    }();
    return *allocator;
  }

  c10::DataPtr allocate(size_t n) override {
    void* data = inner_->raw_allocate(n);
    {
      std::lock_guard lock(mutex_);
      if (data) sizes_[data] = n;
      ++alive_[n];
      live_bytes_ += n;
    }
    if (on_allocate) on_allocate();
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    default_copy_data(to, from, count);
  }

  size_t live_bytes() const {
    std::lock_guard lock(mutex_);
    return live_bytes_;
  }
  /// Blocks of exactly this size.
  size_t alive(size_t bytes) const {
    std::lock_guard lock(mutex_);
    const auto found = alive_.find(bytes);
    return found == alive_.end() ? 0 : found->second;
  }

  std::function<void()> on_allocate;

 private:
  explicit CountingAllocator(c10::Allocator* inner) : inner_(inner) {}

  static void release(void* data) {
    if (!data) return;
    CountingAllocator& self = install();
    {
      std::lock_guard lock(self.mutex_);
      const auto found = self.sizes_.find(data);
      --self.alive_[found->second];
      self.live_bytes_ -= found->second;
      self.sizes_.erase(found);
    }
    self.inner_->raw_deallocate(data);
  }

  c10::Allocator* inner_;
  mutable std::mutex mutex_;
  std::unordered_map<void*, size_t> sizes_;
  std::map<size_t, size_t> alive_;  // blocks, by size
  size_t live_bytes_ = 0;
};

}  // namespace fsdp2::testing
