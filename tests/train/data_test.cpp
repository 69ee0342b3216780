// Text into windows: splits, epochs, and what each rank reads.

#include "train/data.h"

#include "support/errors.h"
#include "support/temporary_folder.h"
#include "support/tensors.h"
#include "train/permutation.h"
#include "train/schedule.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <set>

namespace fsdp2::train {
namespace {

using ::fsdp2::testing::list_of;
using ::fsdp2::testing::TemporaryFolder;
using ::testing::HasSubstr;

std::string error_of_data(const DataOptions& options) {
  return fsdp2::testing::error_of([&] { Dataset dataset(options); });
}

/// 40 documents of 10 to 49 bytes; the text of document i is the letter i over and over.
void write_documents(const TemporaryFolder& folder) {
  for (int i = 0; i < 40; ++i) {
    folder.write("sub" + std::to_string(i % 3) + "/" + std::to_string(i) + ".txt",
                 std::string(10 + i, static_cast<char>('A' + i)));
  }
}

TEST(TokenStream, EndsDocumentsWithAZero) {
  const std::string one = "ab", two = "c", open = "de";
  TokenStream stream;
  stream.append({one.data(), 3});
  stream.append({open.data(), 2, /*open=*/true});
  stream.append({two.data(), 2});
  ASSERT_EQ(stream.size(), 7);
  std::vector<int64_t> out(7);
  stream.read(0, 7, out.data());
  EXPECT_THAT(out, ::testing::ElementsAre('a', 'b', 0, 'd', 'e', 'c', 0));
  stream.read(2, 3, out.data());
  EXPECT_THAT(std::vector<int64_t>(out.begin(), out.begin() + 3),
              ::testing::ElementsAre(0, 'd', 'e'));
}

TEST(Dataset, HoldsOutWholeDocumentsByName) {
  TemporaryFolder folder, copy;
  write_documents(folder);
  write_documents(copy);
  const Dataset data({.paths = {folder.path()}, .validation = 0.2, .seq = 7});
  EXPECT_EQ(data.documents(), 40);
  EXPECT_EQ(data.train_size() + data.validation_size(), 40 * 10 + 39 * 40 / 2 + 40);
  std::set<int64_t> train, held_out;
  for (int64_t i = 0; i < 500; ++i) {
    for (const int64_t token : list_of(data.train_batch(i, 0, 1, 1).x)) train.insert(token);
  }
  const int64_t batches = data.validation_batches(1000, 1, 1);
  for (int64_t i = 0; i < batches; ++i) {
    for (const int64_t token : list_of(data.validation_batch(i, batches, 0, 1, 1).x))
      held_out.insert(token);
  }
  train.erase(0);
  held_out.erase(0);
  for (const int64_t token : held_out) EXPECT_EQ(train.count(token), 0) << token;
  EXPECT_EQ(train.size() + held_out.size(), 40);

  const Dataset elsewhere({.paths = {copy.path()}, .validation = 0.2, .seq = 7});
  EXPECT_EQ(elsewhere.validation_size(), data.validation_size());
  EXPECT_TRUE(torch::equal(elsewhere.train_batch(3, 0, 1, 4).x, data.train_batch(3, 0, 1, 4).x));
}

TEST(Dataset, TokenIdsAreReadAsTheyAre) {
  TemporaryFolder folder;
  for (const int64_t width : {2, 4}) {
    std::string bytes;
    for (int64_t token = 1000; token < 1100; ++token) {
      for (int64_t i = 0; i < width; ++i)
        bytes.push_back(static_cast<char>(token / (i == 0 ? 1 : 256) % (i < 2 ? 256 : 1)));
    }
    DataOptions options{.paths = {folder.write("ids", bytes)},
                        .width = width,
                        .vocab = 1100,
                        .validation = 0.1,
                        .seq = 9};
    const Dataset data(options);
    EXPECT_FALSE(data.is_text());
    EXPECT_EQ(data.train_size(), 90);
    EXPECT_EQ(data.validation_size(), 10);  // no zero is added
    const Batch held_out = data.validation_batch(0, 1, 0, 1, 1);
    EXPECT_TRUE(torch::equal(held_out.x[0], torch::arange(1090, 1099)));
    EXPECT_TRUE(torch::equal(held_out.y[0], torch::arange(1091, 1100)));
    EXPECT_EQ(data.train_batch(0, 0, 1, 1).x.min().item<int64_t>() / 100, 10);

    options.vocab = 1099;
    EXPECT_THAT(error_of_data(options), HasSubstr("ids has token 1099"));
    folder.write("ids", bytes + "x");
    EXPECT_THAT(error_of_data(options), HasSubstr("no token ids of " + std::to_string(width)));
  }
  folder.write("ids", std::string(100, 'a'));
  EXPECT_THAT(error_of_data({.paths = {folder.path("ids")}, .vocab = 255}),
              HasSubstr("the model's is 255"));
}

TEST(Dataset, HoldsOutTheEndOfASingleDocument) {
  TemporaryFolder folder;
  const auto path = folder.write("a.txt", std::string(90, 'a') + std::string(10, 'b'));
  const Dataset data({.paths = {path}, .validation = 0.1, .seq = 10});
  EXPECT_EQ(data.train_size(), 90);
  EXPECT_EQ(data.validation_size(), 11);
  const auto batch = data.validation_batch(0, 1, 0, 1, 1);
  EXPECT_THAT(list_of(batch.x), ::testing::Each('b'));
  EXPECT_EQ(batch.y[0][9].item<int64_t>(), 0);
}

TEST(Dataset, ReadsEachWindowOnceAnEpoch) {
  TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 200; ++i) text.push_back(static_cast<char>(i + 1));
  const Dataset data({.paths = {folder.write("a", text)}, .validation = 0.1, .seq = 9});
  const int64_t windows = (data.train_size() - 1) / 9 - 1;
  for (const int64_t epoch : {0, 1}) {
    std::set<int64_t> seen;
    for (int64_t i = 0; i < windows; ++i) {
      const auto x = list_of(data.train_batch(epoch * windows + i, 0, 1, 1).x);
      seen.insert(x.begin(), x.end());
    }
    EXPECT_EQ(static_cast<int64_t>(seen.size()), windows * 9) << "epoch " << epoch;
  }
  EXPECT_NE(list_of(data.train_batch(0, 0, 1, 8).x), list_of(data.train_batch(windows, 0, 1, 8).x));
}

TEST(Dataset, RanksTogetherReadTheSameWhateverTheirNumber) {
  TemporaryFolder folder;
  write_documents(folder);
  const Dataset data({.paths = {folder.path()}, .validation = 0.2, .seq = 6});
  const auto whole = data.train_batch(5, 0, 1, 6);
  const auto whole_validation = data.validation_batch(1, 3, 0, 1, 6);
  for (const int64_t ranks : {2, 3}) {
    std::vector<torch::Tensor> x, y, held_out;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const auto part = data.train_batch(5, rank, ranks, 6 / ranks);
      x.push_back(part.x);
      y.push_back(part.y);
      held_out.push_back(data.validation_batch(1, 3, rank, ranks, 6 / ranks).x);
    }
    EXPECT_TRUE(torch::equal(torch::cat(x), whole.x));
    EXPECT_TRUE(torch::equal(torch::cat(y), whole.y));
    EXPECT_TRUE(torch::equal(torch::cat(held_out), whole_validation.x));
  }
  EXPECT_TRUE(torch::equal(whole.x.narrow(1, 1, 5), whole.y.narrow(1, 0, 5)));
}

TEST(Dataset, TakesTheAskedExtensionsFromFolders) {
  TemporaryFolder folder;
  folder.write("a.h", std::string(100, 'h'));
  folder.write("b.txt", std::string(100, 't'));
  folder.write("deep/c.cpp", std::string(100, 'c'));
  EXPECT_EQ(Dataset({.paths = {folder.path()}, .extensions = {"h", ".cpp"}, .seq = 3}).documents(),
            2);
  EXPECT_EQ(Dataset({.paths = {folder.path()}, .seq = 3}).documents(), 3);
}

TEST(Dataset, SaysWhatIsWrongWithThePath) {
  TemporaryFolder folder;
  const auto path = folder.write("small.txt", "abc");
  EXPECT_THAT(error_of_data({.paths = {folder.path("none")}}),
              HasSubstr("no file or folder " + folder.path("none")));
  EXPECT_THAT(error_of_data({.paths = {path}, .seq = 50}),
              HasSubstr("small.txt has 2 tokens, but one window takes 51"));
  EXPECT_THAT(error_of_data({.paths = {folder.path()}, .extensions = {"h"}}),
              HasSubstr("no text in"));
  EXPECT_THAT(error_of_data({}), HasSubstr("at least one file or folder"));
}

TEST(Permute, IsAShuffleOfItsRange) {
  for (const uint64_t size : {1, 2, 3, 7, 64, 1000}) {
    std::set<uint64_t> seen;
    uint64_t fixed = 0;
    for (uint64_t i = 0; i < size; ++i) {
      const uint64_t place = permute(i, size, 42);
      EXPECT_LT(place, size);
      seen.insert(place);
      fixed += place == i;
    }
    EXPECT_EQ(seen.size(), size);
    if (size == 1000) {
      EXPECT_LT(fixed, 10);
    }
  }
  EXPECT_THROW(permute(3, 3, 0), c10::IndexError);
}

TEST(Schedule, WarmsUpThenFollowsACosine) {
  const Schedule schedule{.peak = 2, .warmup = 4, .steps = 15, .final_fraction = 0.1};
  EXPECT_DOUBLE_EQ(schedule.at(0), 0.5);
  EXPECT_DOUBLE_EQ(schedule.at(3), 2);
  EXPECT_DOUBLE_EQ(schedule.at(4), 2);
  EXPECT_DOUBLE_EQ(schedule.at(9), 1.1);  // half way
  EXPECT_DOUBLE_EQ(schedule.at(14), 0.2);
  EXPECT_DOUBLE_EQ((Schedule{.peak = 3, .warmup = 0, .steps = 1}.at(0)), 3);
}

}  // namespace
}  // namespace fsdp2::train
