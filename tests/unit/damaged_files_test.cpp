// Files with random damage: an error or a value, never a crash, a hang or a huge allocation. Run
// under sanitizers; FSDP2_FUZZ_SECONDS makes it longer.

#include "checkpoint/archive.h"
#include "checkpoint/file_io.h"
#include "checkpoint/metadata_codec.h"
#include "support/fuzz.h"
#include "support/temporary_folder.h"

#include <fsdp2/dcp.h>
#include <fsdp2/safetensors.h>

#include <torch/torch.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <random>

namespace fsdp2::damaged_files_test {
namespace {

namespace fs = std::filesystem;
using fsdp2::testing::TemporaryFolder;

/// A few random changes of the kinds that discs, networks and people make.
std::string damaged(std::string bytes, std::mt19937& random) {
  const auto below = [&](size_t count) { return count == 0 ? 0 : random() % count; };
  for (size_t changes = 1 + below(4); changes > 0; --changes) {
    const size_t at = below(bytes.size());
    switch (below(6)) {
      case 0:
        bytes[at] = static_cast<char>(random());
        break;
      case 1:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
        break;
      case 2:
        bytes.resize(at);
        break;
      case 3:
        bytes.insert(at, bytes.substr(below(bytes.size()), below(50)));
        break;
      case 4:
        bytes.erase(at, below(20));
        break;
      default: {  // a number that is far too large
        const uint32_t large = 0xfffffff0U + static_cast<uint32_t>(below(16));
        for (size_t i = 0; i < 4 && at + i < bytes.size(); ++i) {
          bytes[at + i] = static_cast<char>(large >> (8 * i));
        }
      }
    }
    if (bytes.empty()) bytes = "x";
  }
  return bytes;
}

/// Damages `bytes` again and again and lets `read` read them.
void expect_only_errors(const std::string& bytes,
                        const std::function<void(const std::string&)>& read) {
  std::mt19937 random(fsdp2::testing::first_seed());
  const auto end = std::chrono::steady_clock::now() + fsdp2::testing::fuzz_time();
  int refused = 0, round = 0;
  for (; round < 1500 || std::chrono::steady_clock::now() < end; ++round) {
    try {
      read(damaged(bytes, random));
    } catch (const c10::Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, round / 10) << "the damage is not seen";
}

std::string saved(const TemporaryFolder& folder) {
  dcp::StateDict state;
  state["w"] = torch::arange(12.).view({3, 4});
  state["nested"]["half"] = torch::ones({5}, torch::kBFloat16);
  state["nested"]["bytes8"] = torch::ones({2}, torch::kFloat8_e4m3fn);
  state["scalar"] = torch::tensor(7.F);
  state["betas"] = dcp::Tuple{{0.9, 0.95}};
  state["names"] = dcp::List{"a", "b", dcp::List{1, 2}};
  state["none"] = dcp::None{};
  dcp::save(state, folder.path("c"), {.threads = 1});
  return folder.path("c");
}

TEST(DamagedFiles, Metadata) {
  const TemporaryFolder folder;
  const std::string bytes = files::read_all(saved(folder) + "/.metadata");
  EXPECT_EQ(dcp::decode(bytes, "f").entries.size(), 7U);
  expect_only_errors(bytes, [](const std::string& damage) { dcp::decode(damage, "f"); });
}

TEST(DamagedFiles, Items) {
  const TemporaryFolder folder;
  const std::string path = saved(folder);
  for (const auto& entry : dcp::read_metadata(path).entries) {
    const dcp::Place& place = entry.chunks[0].place;
    const std::string item =
        files::read_all((fs::path(path) / place.file).string()).substr(place.offset, place.length);
    if (entry.key != "w" && entry.key != "names" && entry.key != "nested.bytes8") continue;
    expect_only_errors(item, [&](const std::string& damage) {
      const files::ReadFile file(folder.write("item", damage));
      if (entry.is_tensor) {
        dcp::read_stored_tensor(file, 0, file.size());
      } else {
        dcp::read_object(file, 0, file.size());
      }
    });
  }
}

TEST(DamagedFiles, WholeFolders) {
  const TemporaryFolder folder;
  const std::string path = saved(folder);
  const std::string metadata = files::read_all(path + "/.metadata");
  expect_only_errors(metadata, [&](const std::string& damage) {
    std::ofstream(path + "/.metadata", std::ios::binary) << damage;
    dcp::load_everything(path);
  });
}

TEST(DamagedFiles, TorchFiles) {
  const TemporaryFolder folder;
  dcp::StateDict state = {{"w", torch::arange(12.).view({3, 4})},
                          {"list", dcp::List{torch::ones({2}), 3, "x"}}};
  dcp::write_torch_file(state, folder.path("f.pt"));
  const dcp::Value back = dcp::read_torch_file(folder.path("f.pt"));
  EXPECT_TRUE(torch::equal(back.at("w").to_tensor(), state["w"].to_tensor()));
  EXPECT_EQ(back.at("list").items()[2].to_string(), "x");
  expect_only_errors(files::read_all(folder.path("f.pt")), [&](const std::string& damage) {
    dcp::read_torch_file(folder.write("damaged", damage));
  });
}

TEST(DamagedFiles, Safetensors) {
  const TemporaryFolder folder;
  safetensors::save(folder.path("m.safetensors"),
                    {{"a", torch::ones({3, 2})}, {"b", torch::ones({4}, torch::kInt64)}},
                    {{"format", "pt"}});
  expect_only_errors(files::read_all(folder.path("m.safetensors")).substr(0, 200),
                     [&](const std::string& damage) {
                       const safetensors::Reader reader(folder.write("damaged", damage));
                       for (const auto& entry : reader.entries()) reader.read(entry.name);
                     });
}

/// What a pickle could do to a reader that obeys it.
TEST(DamagedFiles, PicklesThatMeanHarm) {
  const auto error_of = [](const std::string& bytes) -> std::string {
    try {
      dcp::decode(bytes, "f");
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "";
  };
  // os.system("..."), a list in itself, a list of lists of lists 2^40 long, a 4 GiB string.
  EXPECT_NE(
      error_of(std::string("\x80\x02") + "cos\nsystem\nX\x02\0\0\0lsq\0\x85R.").find("damaged"),
      std::string::npos);
  EXPECT_NE(error_of(std::string("\x80\x02]q\0h\0a.", 8)), "");
  std::string doubling("\x80\x02]q\0", 5);
  for (int i = 0; i < 40; ++i) {
    doubling += std::string("](h", 3) + static_cast<char>(i) + "h" + static_cast<char>(i) + "eq" +
                static_cast<char>(i + 1);
  }
  EXPECT_NE(error_of(doubling + "."), "");
  EXPECT_NE(error_of(std::string("\x80\x02X\xff\xff\xff\xff", 7)).find("ends too early"),
            std::string::npos);
}

}  // namespace
}  // namespace fsdp2::damaged_files_test
