#include "comm/counting.h"
#include "fsdp/shared_bytes.h"

#include <algorithm>

namespace fsdp2::fsdp {
namespace {

/// Ranks that gather different groups find out from the words; the parameters lie where all see
/// them.
class SharedGather final : public Gather {
 public:
  SharedGather(std::shared_ptr<SharedBytes> bytes, CommContextPtr context,
               const std::vector<torch::Tensor>& shards, const GatherWords& words)
      : bytes_(std::move(bytes)),
        context_(std::move(context)),
        shards_(shards),
        number_(bytes_->next()),
        again_(words.mode != 0),  // in backward, after a forward that has copied the same
        place_(host().say({words, number_})) {
    comm::count_collective(&CollectiveCounts::all_gathers, bytes_->size());
    if (bytes_->has_memory() && bytes_->free_to_write(/*wait=*/false)) publish();
  }

  ~SharedGather() override {
    host().forget(place_);
    if (!leased_) bytes_->let_go(number_);
  }

  std::vector<c10::DataPtr> finish(const std::string& what) override {
    try {
      const bool agreed = read_words();
      host().forget(place_);
      if (!agreed) return junk();
      if (!bytes_->has_memory()) bytes_->make_memory();
      // In forward no reduction is on its way, and all ranks are here.
      if (!again_) host().reductions.prepare(context_->gather_group);
      if (!published_) {
        bytes_->free_to_write(/*wait=*/true);
        publish();
      }
      bytes_->wait_for_all();
    } catch (c10::Error& error) {
      error.add_context("in " + what);
      throw;
    }
    leased_ = true;
    return bytes_->lease(shards_);
  }

  const std::vector<GatherWords>& words() const override { return words_; }

 private:
  void publish() {
    bytes_->publish(shards_, again_);
    published_ = true;
  }

  HostGroup& host() const { return *context_->host; }

  /// Whether all ranks gather this group.
  bool read_words() {
    uint64_t number = number_;
    for (const SharedWords& said : host().hear(place_)) {
      words_.push_back(said.words);
      number = std::max(number, said.number);
    }
    const bool agreed = std::all_of(words_.begin(), words_.end(),
                                    [&](const GatherWords& other) { return other == words_[0]; });
    // They count differently after a gather that failed on some of them.
    if (agreed && number != number_) {
      number_ = number;
      bytes_->agree_on(number);
      published_ = false;
    }
    return agreed;
  }

  /// The caller is going to refuse the words.
  std::vector<c10::DataPtr> junk() const {
    std::vector<c10::DataPtr> out;
    for (const ParamLayout& layout : context_->layouts) {
      out.push_back(c10::GetAllocator(c10::kCPU)->allocate(static_cast<size_t>(layout.nbytes())));
    }
    return out;
  }

  std::shared_ptr<SharedBytes> bytes_;
  CommContextPtr context_;
  std::vector<torch::Tensor> shards_;
  uint64_t number_;
  const bool again_;
  const uint64_t place_;
  bool published_ = false, leased_ = false;
  std::vector<GatherWords> words_;
};

}  // namespace

std::unique_ptr<Gather> start_shared_gather(std::shared_ptr<SharedBytes> bytes,
                                            CommContextPtr context,
                                            const std::vector<torch::Tensor>& shards,
                                            const GatherWords& words) {
  return std::make_unique<SharedGather>(std::move(bytes), std::move(context), shards, words);
}

}  // namespace fsdp2::fsdp
