#include "checkpoint/save_plan.h"

#include "checkpoint/digest.h"
#include "checkpoint/dtypes.h"
#include "checkpoint/json_bytes.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <unordered_map>

namespace fsdp2::dcp {
namespace {

using Json = nlohmann::json;

/// What a rank says of a leaf.
struct Claim {
  std::string key;
  std::vector<PathPart> path;
  std::string dtype;  // empty: an object
  std::vector<int64_t> sizes;
  Block block;
  bool sharded = false;
  uint64_t bytes = 0;
  uint64_t digest = 0;  // of what should be the same on all ranks
};

void to_json(Json& json, const Claim& claim) {
  json = {claim.key,         json_of(claim.path), claim.dtype, claim.sizes, claim.block.offsets,
          claim.block.sizes, claim.sharded,       claim.bytes, claim.digest};
}

void from_json(const Json& json, Claim& claim) {
  claim.key = json[0].get<std::string>();
  claim.path = path_of(json[1]);
  json[2].get_to(claim.dtype);
  json[3].get_to(claim.sizes);
  json[4].get_to(claim.block.offsets);
  json[5].get_to(claim.block.sizes);
  json[6].get_to(claim.sharded);
  json[7].get_to(claim.bytes);
  json[8].get_to(claim.digest);
}

uint64_t digest_of_values(const SaveLeaf& leaf) {
  if (!leaf.is_tensor()) return files::digest_of(leaf.archive.data(), leaf.archive.size());
  const torch::Tensor values = leaf.data.cpu().contiguous();
  return files::digest_of(values.nbytes() > 0 ? values.const_data_ptr() : nullptr, values.nbytes());
}

std::vector<Claim> claims_of(const std::vector<SaveLeaf>& leaves, bool compare) {
  std::vector<Claim> claims;
  claims.reserve(leaves.size());
  for (const SaveLeaf& leaf : leaves) {
    claims.push_back({leaf.key, leaf.path, leaf.is_tensor() ? dtype_name(leaf.dtype) : "",
                      leaf.sizes, leaf.block, leaf.sharded, leaf.is_tensor() ? 0 : leaf.bytes(),
                      compare && !leaf.sharded ? digest_of_values(leaf) : 0});
  }
  return claims;
}

/// The claims of one key, by rank.
struct Claims {
  std::vector<std::pair<int, const Claim*>> by_rank;
};

void check_agreement(const Claims& claims, const Exchange& exchange) {
  const auto& [first_rank, first] = claims.by_rank.front();
  for (const auto& [rank, claim] : claims.by_rank) {
    const auto describe = [](const Claim& of) {
      if (of.dtype.empty()) return std::string("an object");
      return c10::str(of.sharded ? "a sharded " : "a plain ", of.dtype, " tensor of ",
                      c10::IntArrayRef(of.sizes));
    };
    TORCH_CHECK_VALUE(claim->dtype == first->dtype && claim->sizes == first->sizes &&
                          claim->sharded == first->sharded,
                      first->key, " is ", describe(*first), " on rank ",
                      exchange.ranks()[static_cast<size_t>(first_rank)], " but ", describe(*claim),
                      " on rank ", exchange.ranks()[static_cast<size_t>(rank)]);
  }
}

class SavePlanner {
 public:
  SavePlanner(const std::vector<std::vector<Claim>>& of_ranks, const Exchange& exchange)
      : of_ranks_(of_ranks), exchange_(exchange), load_(of_ranks.size()) {}

  SavePlan run() {
    std::vector<Claims> keys;
    std::unordered_map<std::string, size_t> index;
    for (size_t rank = 0; rank < of_ranks_.size(); ++rank) {
      for (const Claim& claim : of_ranks_[rank]) {
        const auto [place, added] = index.emplace(claim.key, keys.size());
        if (added) keys.emplace_back();
        keys[place->second].by_rank.emplace_back(static_cast<int>(rank), &claim);
      }
    }
    for (const Claims& claims : keys) {
      check_agreement(claims, exchange_);
      add(claims);
    }
    assign_owners();
    return std::move(plan_);
  }

 private:
  struct Choice {
    size_t entry, block;
    uint64_t bytes;
    std::vector<int> ranks;
  };

  void add(const Claims& claims) {
    const Claim& first = *claims.by_rank.front().second;
    StoredEntry entry;
    entry.key = first.key;
    entry.path = first.path;
    entry.is_tensor = !first.dtype.empty();
    if (const auto dtype = dtype_named(first.dtype)) entry.dtype = *dtype;
    entry.sizes = first.sizes;

    std::map<Block, std::vector<int>> holders;
    for (const auto& [rank, claim] : claims.by_rank) {
      if (claim->digest != first.digest) continue;
      holders[claim->block].push_back(rank);
    }
    if (holders.size() == 1 && !first.sharded &&
        holders.begin()->second.size() < claims.by_rank.size()) {
      plan_.disagreeing.push_back(first.key);
      holders.begin()->second.resize(1);  // the first rank's values count
    }
    // Ranks with nothing need no item, but a tensor without elements needs one.
    const int64_t numel = entry.numel();
    if (numel == 0) holders.erase(std::next(holders.begin()), holders.end());
    int64_t held = 0;
    for (const auto& [block, ranks] : holders) {
      if (block.numel() == 0 && numel > 0) continue;
      held += block.numel();
      add_pieces(entry, block, ranks, first.bytes);
    }
    TORCH_CHECK_VALUE(!entry.is_tensor || held == numel, first.key, ": the ranks that save hold ",
                      held, " of its ", numel, " elements; all ranks of its mesh must take part");
    plan_.owners.emplace_back(entry.chunks.size(), 0);
    plan_.entries.push_back(std::move(entry));
  }

  void add_pieces(StoredEntry& entry, const Block& block, const std::vector<int>& ranks,
                  uint64_t object_bytes) {
    const auto element =
        entry.is_tensor ? static_cast<int64_t>(c10::elementSize(entry.dtype)) : int64_t{1};
    for (const Block& piece : split(block, kPieceBytes / element)) {
      const uint64_t bytes =
          entry.is_tensor ? static_cast<uint64_t>(piece.numel() * element) : object_bytes;
      choices_.push_back({plan_.entries.size(), entry.chunks.size(), bytes, ranks});
      entry.chunks.push_back({piece.offsets, piece.sizes, {}});
    }
  }

  /// What only one rank has is its own; of the rest, the largest first, each to whom has least.
  void assign_owners() {
    std::stable_sort(choices_.begin(), choices_.end(), [](const Choice& a, const Choice& b) {
      return std::pair(a.ranks.size() > 1, b.bytes) < std::pair(b.ranks.size() > 1, a.bytes);
    });
    for (const Choice& choice : choices_) {
      const int owner = *std::min_element(choice.ranks.begin(), choice.ranks.end(),
                                          [&](int a, int b) { return load(a) < load(b); });
      plan_.owners[choice.entry][choice.block] = owner;
      constexpr uint64_t of_an_item = 1000;  // its archive, roughly
      load(owner) += choice.bytes + of_an_item;
    }
  }
  uint64_t& load(int rank) { return load_[static_cast<size_t>(rank)]; }

  const std::vector<std::vector<Claim>>& of_ranks_;
  const Exchange& exchange_;
  std::vector<uint64_t> load_;  // bytes, by rank
  std::vector<Choice> choices_;
  SavePlan plan_;
};

/// The last plan, and what it was made from: one state is saved again and again.
struct Kept {
  uint64_t structure = 0;  // of this rank's claims, digests left out
  std::vector<int> ranks;
  int64_t number = 0;  // counts alike on all ranks
  std::shared_ptr<const SavePlan> plan;
};
std::mutex kept_mutex;
Kept& kept() {
  static auto* kept = new Kept();
  return *kept;
}

}  // namespace

std::shared_ptr<const SavePlan> plan_save(const std::vector<SaveLeaf>& leaves,
                                          const Exchange& exchange) {
  const std::lock_guard lock(kept_mutex);
  Kept& last = kept();
  std::vector<Claim> claims;
  uint64_t structure = 0;
  const auto states = exchange.all([&] {
    claims = claims_of(leaves, exchange.size() > 1);
    std::vector<Claim> bare = claims;
    files::Digest values;
    for (Claim& claim : bare) {
      values.add(&claim.digest, sizeof(claim.digest));
      claim.digest = 0;
    }
    const std::string bytes = to_bytes(bare);
    structure = files::digest_of(bytes.data(), bytes.size());
    const bool known = last.plan && last.structure == structure && last.ranks == exchange.ranks();
    return Json{known ? last.number : -1, values.value()}.dump();
  });
  // Only if no rank has anything new, and copies are copies.
  const bool unchanged =
      last.plan && Json::parse(states[0])[0] >= 0 &&
      std::all_of(states.begin(), states.end(), [&](const auto& s) { return s == states[0]; });
  if (unchanged) return last.plan;

  std::vector<std::vector<Claim>> of_ranks;
  for (const std::string& bytes : exchange.all([&] { return to_bytes(claims); })) {
    of_ranks.push_back(Json::from_msgpack(bytes).get<std::vector<Claim>>());
  }
  last.plan.reset();
  auto plan = std::make_shared<SavePlan>();
  try {
    *plan =
        SavePlanner(of_ranks, exchange).run();  // throws on all ranks, as all have the same claims
  } catch (const c10::Error& error) {
    TORCH_CHECK_VALUE(false, exchange.doing(), ": ", error.what_without_backtrace());
  }
  ++last.number;
  if (plan->disagreeing.empty()) {
    last.structure = structure;
    last.ranks = exchange.ranks();
    last.plan = plan;
  }
  return plan;
}

}  // namespace fsdp2::dcp
