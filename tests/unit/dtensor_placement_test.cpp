#include <fsdp2/placement.h>

#include <torch/torch.h>

#include <gtest/gtest.h>
#include <sstream>

namespace fsdp2 {
namespace {

TEST(Placement, PrintsAsPyTorch) {
  EXPECT_EQ(Shard(1).to_string(), "Shard(dim=1)");
  EXPECT_EQ(Replicate().to_string(), "Replicate()");
  EXPECT_EQ(Partial("avg").to_string(), "Partial(avg)");
  EXPECT_EQ(to_string({Shard(0), Replicate()}), "[Shard(dim=0), Replicate()]");
  std::ostringstream out;
  out << Partial();
  EXPECT_EQ(out.str(), "Partial(sum)");
}

TEST(Placement, Compares) {
  EXPECT_EQ(Shard(0), Shard(0));
  EXPECT_NE(Shard(0), Shard(1));
  EXPECT_NE(Shard(0), Replicate());
  EXPECT_NE(Partial("sum"), Partial("avg"));
  EXPECT_NE(PartialNorm(1), PartialNorm(2));
  EXPECT_TRUE(Shard(1).is_shard(1));
  EXPECT_FALSE(Shard(1).is_shard(0));
}

TEST(Placement, RefusesAnUnknownReduction) { EXPECT_THROW(Partial("median"), c10::ValueError); }

TEST(Chunk, FollowsTorchChunk) {
  for (int64_t size : {0, 1, 3, 5, 6, 7, 12}) {
    for (int64_t ranks : {1, 2, 3, 4}) {
      const auto expected = torch::arange(size).chunk(ranks);
      int64_t offset = 0;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const Chunk chunk = chunk_of(size, ranks, rank);
        const int64_t length =
            rank < static_cast<int64_t>(expected.size()) ? expected[rank].numel() : 0;
        EXPECT_EQ(chunk.length, length) << size << " over " << ranks << " rank " << rank;
        if (length > 0) {
          EXPECT_EQ(chunk.offset, offset);
        }
        offset += length;
      }
      EXPECT_EQ(offset, size);
    }
  }
}

}  // namespace
}  // namespace fsdp2
