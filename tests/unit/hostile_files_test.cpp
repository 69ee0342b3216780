// Files that mean harm: a few bytes that stand for very much, or say what readers would take in two
// ways. Each is refused, or read at the price of its size.

#include "checkpoint/archive.h"
#include "checkpoint/metadata_codec.h"
#include "checkpoint/objects.h"
#include "support/errors.h"
#include "support/temporary_folder.h"

#include <fsdp2/dcp.h>
#include <fsdp2/safetensors.h>

#include <torch/torch.h>

#include <cstring>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp2::hostile_files_test {
namespace {

using fsdp2::testing::error_of;
using fsdp2::testing::TemporaryFolder;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// What C++ says of a pickle that it does not read.
std::string refusal(const std::string& pickle) {
  try {
    dcp::from_pickle(pickle);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

std::string repeated(const std::string& what, int times) {
  std::string text;
  text.reserve(what.size() * static_cast<size_t>(times));
  for (int i = 0; i < times; ++i) text += what;
  return text;
}
/// The value that was numbered 0.
std::string recall() { return {"h\0", 2}; }

/// A pickle that begins with a text of `size`, which recall() means from then on.
std::string with_text(uint32_t size, const std::string& rest) {
  std::string pickle = "\x80\x02X";
  pickle.append(reinterpret_cast<const char*>(&size), 4).append(size, 'x');
  return pickle + std::string("q\0000", 3) + rest;
}

TEST(HostilePickles, TextsThatAreMentionedOftenAreNotCopiedOften) {
  const std::string names = repeated(recall() + recall() + "\x93" + "0", 20'000);
  EXPECT_THAT(refusal(with_text(500'000, names + "N.")), HasSubstr("over 1000 characters"));
  const std::string list = "](" + repeated(recall(), 2'000) + "e.";
  EXPECT_THAT(refusal(with_text(100'000, list)), HasSubstr("a thousand times"));
  EXPECT_EQ(refusal(with_text(100, list)), "");
  const std::string encoded = "(" + recall() + "X" + std::string("\6\0\0\0", 4) + "latin1tR";
  const std::string bytes = "](" + repeated("c_codecs\nencode\n" + encoded, 2'000) + "e.";
  EXPECT_THAT(refusal(with_text(100'000, bytes)), HasSubstr("a thousand times"));
  EXPECT_EQ(refusal(with_text(100, bytes)), "");
}

TEST(HostilePickles, ListsOfListsAreNotUnfolded) {
  std::string doubling("\x80\x02]q\0", 5);
  for (int i = 0; i < 24; ++i) {
    const char at = static_cast<char>(i);
    doubling += std::string("](h") + at + "h" + at + "eq" + static_cast<char>(i + 1);
  }
  EXPECT_THAT(refusal(doubling + "."), HasSubstr("left over"));
  EXPECT_THAT(refusal(doubling + repeated("\x86", 24) + "."), HasSubstr("a thousand times"));
}

TEST(HostilePickles, NumbersOfMentionedValuesAreBelowTheLength) {
  EXPECT_THAT(refusal("\x80\x02Nr\xff\xff\xff\x7f."), HasSubstr("numbers more values"));
  EXPECT_EQ(refusal(std::string("\x80\x02Nq\x05"
                                "0Nq\0000h\x05.",
                                13)),
            "");
}

/// What is saved can be read, however often it says the same.
TEST(HostilePickles, OurOwnAreNeverTooMuch) {
  const dcp::List long_texts(3000, std::string(20'000, 'x'));
  const dcp::List short_texts(100'000, std::string(900, 'x'));
  for (const dcp::List& list : {long_texts, short_texts}) {
    EXPECT_EQ(dcp::from_pickle(dcp::to_pickle(list)).items().size(), list.size());
  }
}

/// Metadata with one tensor of 4 x 6 in these blocks.
dcp::Metadata with_blocks(const std::vector<dcp::StoredChunk>& chunks) {
  dcp::Metadata metadata;
  metadata.add({"w", {"w"}, true, torch::kFloat32, {4, 6}, chunks});
  return metadata;
}
std::string decoding(const dcp::Metadata& metadata) {
  return error_of([&] { dcp::decode(dcp::encode(metadata), "f"); });
}

TEST(HostileMetadata, BlocksThatOverlapAreSeenWhicheverWayTheyAreCut) {
  const dcp::Place place{"f", 0, 0};
  EXPECT_EQ(decoding(with_blocks({{{0, 0}, {4, 3}, place}, {{0, 3}, {4, 3}, place}})), "");
  EXPECT_EQ(decoding(with_blocks(
                {{{0, 0}, {1, 6}, place}, {{1, 0}, {3, 2}, place}, {{1, 2}, {3, 4}, place}})),
            "");
  EXPECT_THAT(decoding(with_blocks({{{0, 0}, {4, 3}, place}, {{0, 2}, {4, 3}, place}})),
              HasSubstr("blocks of w overlap"));
  EXPECT_THAT(decoding(with_blocks({{{0, 0}, {2, 6}, place}, {{1, 0}, {2, 6}, place}})),
              HasSubstr("blocks of w overlap"));
  EXPECT_THAT(decoding(with_blocks({{{0, 0}, {4, 3}, place}})), HasSubstr("do not fill it"));
}

TEST(HostileMetadata, ManyBlocksInOneRowAreCheckedInTime) {
  constexpr int64_t count = 50'000;
  dcp::Metadata metadata;
  dcp::StoredEntry& entry = metadata.add({"w", {"w"}, true, torch::kFloat32, {4, count}, {}});
  for (int64_t i = 0; i < count; ++i) entry.chunks.push_back({{0, i}, {4, 1}, {"f", 0, 0}});
  EXPECT_EQ(decoding(metadata), "");
}

/// Of two readers, one that trusts the path would look for another key.
TEST(HostileMetadata, PathsThatDoNotMakeTheKeyAreLeftOut) {
  dcp::Metadata metadata;
  const dcp::Place place{"f", 0, 0};
  metadata.add({"a.0.b", {"a", int64_t{0}, "b"}, false, torch::kFloat32, {}, {{{}, {}, place}}});
  metadata.add({"c", {"somewhere", "else"}, false, torch::kFloat32, {}, {{{}, {}, place}}});
  metadata.add({"d.e", {"d"}, false, torch::kFloat32, {}, {{{}, {}, place}}});
  const dcp::Metadata back = dcp::decode(dcp::encode(metadata), "f");
  EXPECT_EQ(back.entries[0].path, metadata.entries[0].path);
  EXPECT_THAT(back.entries[1].path, IsEmpty());
  EXPECT_THAT(back.entries[2].path, IsEmpty());
}

TEST(HostileMetadata, EmptyBlocksNeedNoPlace) {
  dcp::Metadata metadata;
  metadata.add({"w", {"w"}, true, torch::kFloat32, {0, 2}, {{{0, 0}, {0, 2}, {}}}});
  EXPECT_EQ(decoding(metadata), "");
}

TEST(HostileMetadata, NamesOfFilesAreNoLongerThanTheSystems) {
  EXPECT_THAT(decoding(with_blocks({{{0, 0}, {4, 6}, {std::string(5000, 'f'), 0, 1}}})),
              HasSubstr("outside of the checkpoint"));
}

TEST(HostileMetadata, ItemsAreApart) {
  const auto at = [](const dcp::Place& a, const dcp::Place& b) {
    return decoding(with_blocks({{{0, 0}, {4, 3}, a}, {{0, 3}, {4, 3}, b}}));
  };
  EXPECT_EQ(at({"f", 0, 10}, {"f", 10, 10}), "");
  EXPECT_EQ(at({"f", 0, 10}, {"g", 0, 10}), "");
  EXPECT_THAT(at({"f", 0, 10}, {"f", 9, 10}), HasSubstr("same bytes of f, from 9 on"));
  EXPECT_THAT(at({"f", 0, 10}, {"./f", 0, 10}), HasSubstr("same bytes of f, from 0 on"));
}

TEST(HostileMetadata, BlocksAreNotSharedAmongTensors) {
  dcp::Metadata metadata;
  dcp::StoredEntry& entry = metadata.add({"w", {"w"}, true, torch::kFloat32, {0}, {}});
  entry.chunks.resize(100, {{0}, {0}, {}});
  std::string bytes = dcp::encode(metadata);
  // The tensor's description becomes number 200, and 100 more keys have it.
  const std::string after(std::string("X\x0c\0\0\0planner_data", 17));
  const size_t at = bytes.find(after);
  ASSERT_NE(at, std::string::npos);
  std::string more(std::string("q\xc8"));
  for (char key = 33; key < 126; ++key) more += std::string("X\1\0\0\0", 5) + key + "h\xc8";
  bytes.insert(at - 1, more);
  EXPECT_THAT(error_of([&] { dcp::decode(bytes, "f"); }),
              HasSubstr("more blocks than it describes"));
}

TEST(HostileArchives, RecordsThatOverlap) {
  const TemporaryFolder folder;
  dcp::write_torch_file({{"a", torch::ones({40})}, {"b", torch::zeros({40})}}, folder.path("f.pt"));
  std::string bytes = files::read_all(folder.path("f.pt"));
  // The directory's entry of data/1 points to where that of data/0 does.
  const size_t first = bytes.rfind("data/0") - 46 - strlen("archive/"),
               second = bytes.rfind("data/1") - 46 - strlen("archive/");
  ASSERT_EQ(bytes.substr(first, 2), "PK");
  ASSERT_EQ(bytes.substr(second, 2), "PK");
  bytes.replace(second + 42, 4, bytes.substr(first + 42, 4));
  const std::string path = folder.write("g.pt", bytes);
  EXPECT_THAT(error_of([&] { dcp::read_torch_file(path); }), HasSubstr("two records overlap"));
}

TEST(HostileArchives, TensorsOfOneStorageShareItAsInPython) {
  const TemporaryFolder folder;
  const torch::Tensor tensor = torch::arange(4.);
  pickle::Writer list;
  list.empty_list().mark();
  for (int i = 0; i < 2; ++i) dcp::put_tensor(tensor, 0, list);
  std::string bytes;
  dcp::write_archive(list.appends().finish(), {tensor}, [&](const void* data, size_t size) {
    bytes.append(static_cast<const char*>(data), size);
  });
  const dcp::Value back = dcp::read_torch_file(folder.write("f.pt", bytes));
  const torch::Tensor a = back.items()[0].to_tensor(), b = back.items()[1].to_tensor();
  EXPECT_TRUE(torch::equal(a, tensor));
  EXPECT_EQ(a.const_data_ptr(), b.const_data_ptr());
}

std::string safetensors_file(const std::string& header, size_t bytes) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header + std::string(bytes, 'k');
}

TEST(HostileSafetensors, HeadersThatAreReadInTwoWays) {
  const TemporaryFolder folder;
  const auto reading = [&](const std::string& entry, size_t bytes) {
    const auto path = folder.write("bad", safetensors_file("{\"x\":" + entry + "}", bytes));
    return error_of([&] { safetensors::Reader reader(path); });
  };
  EXPECT_EQ(reading(R"({"dtype":"U8","shape":[4],"data_offsets":[0,4]})", 4), "");
  for (const char* shape : {"[4.5]", "[true]", "[1e300]", "[18446744073709551615]", "[\"4\"]"}) {
    const std::string entry = std::string(R"({"dtype":"U8","shape":)") + shape;
    EXPECT_THAT(reading(entry + R"(,"data_offsets":[0,4]})", 4), HasSubstr("no integer")) << shape;
  }
  EXPECT_THAT(reading(R"({"dtype":"U8","shape":{"a":4},"data_offsets":[0,4]})", 4),
              HasSubstr("malformed"));
  EXPECT_THAT(reading(R"({"dtype":"U8","shape":[4],"data_offsets":[0,4,8]})", 4),
              HasSubstr("impossible offsets"));
  EXPECT_THAT(reading(R"({"dtype":"U8","shape":[4],"data_offsets":[-4,0]})", 4),
              HasSubstr("impossible offsets"));
  EXPECT_THAT(
      reading(R"({"dtype":"U8","shape":[0,4611686018427387904,4],"data_offsets":[0,0]})", 0),
      HasSubstr("impossible size"));
  EXPECT_THAT(reading(R"({"dtype":)" + std::string(1'000'000, '['), 0),
              HasSubstr("nested too deep"));
}

}  // namespace
}  // namespace fsdp2::hostile_files_test
