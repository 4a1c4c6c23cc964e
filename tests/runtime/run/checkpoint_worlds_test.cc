// Tests of checkpoints that several ranks write and other ranks read (runtime/run/checkpoint.h): slices of any kind,
// damage, which rank reads what, and files of earlier versions.
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>

#include "common/checksum.h"
#include "runtime/run/checkpoint_files.h"
#include "runtime/tensor_files/safetensors.h"
#include "tests/common/expect_error.h"
#include "tests/common/faulty_files.h"
#include "tests/runtime/run/cut_checkpoints.h"

namespace annulus::checkpoint_worlds_test {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

TEST(CheckpointWorlds, AnyWorldReadsWhatAnyOtherWrote) {
  for (int writers = 1; writers <= 4; ++writers) {
    for (unsigned seed = 0; seed < 6; ++seed) {
      const std::string run = fresh_run("worlds");
      const std::string folder = saved(run, 5, writers, seed);
      SCOPED_TRACE(std::to_string(writers) + " writers, seed " + std::to_string(seed));
      for (const int readers : {1, 2, 3, 6}) EXPECT_EQ(read_back(run, readers, seed + 10), 5);
      const Manifest manifest = read_manifest(folder);
      EXPECT_EQ(manifest.world, writers);
      EXPECT_EQ(manifest.version, 2);
      for (const auto& [name, file] : manifest.files) {
        EXPECT_EQ(name.starts_with("optimizer"), is_optimizer(SafetensorsFile(folder + "/" + name).tensors()[0].name));
      }
    }
  }
}

TEST(CheckpointWorlds, FilesAreNumberedOverTheRanksThatWrite) {
  const std::string run = fresh_run("files");
  std::string folder;
  run_ranks(3, [&](Communicator& world) {
    CheckpointStore store(run, 9);
    std::vector<TensorSlice> mine;
    for (const TensorSlice& whole : whole_slices(tensors_of(1))) {
      // Rank 1 writes no part of the model, rank 0 none of the optimizer, rank 2 of both.
      const int64_t half = whole.values.numel() / 2, count = whole.values.numel();
      const int other = is_optimizer(whole.name) ? 1 : 0;
      if (world.rank() == other) mine.push_back({whole.name, whole.shape, 0, whole.values.narrow(0, 0, half)});
      if (world.rank() == 2) {
        mine.push_back({whole.name, whole.shape, half, whole.values.narrow(0, half, count - half)});
      }
    }
    const std::string path = store.save(world, state_of(1).state, mine);
    if (world.rank() == 0) folder = path;
  });
  for (const char* file : {"model-00000-of-00002", "model-00001-of-00002", "optimizer-00000-of-00002"}) {
    EXPECT_TRUE(fs::exists(folder + "/" + file + ".safetensors")) << file;
  }
  // A part of a tensor is stored flat under its name and range, a whole tensor under its name and with its shape.
  const SafetensorsFile file(folder + "/model-00001-of-00002.safetensors");
  ASSERT_NE(file.find("model.a[66:133]"), nullptr);
  EXPECT_EQ(file.find("model.a[66:133]")->shape, (std::vector<int64_t>{67}));
  ASSERT_NE(file.find("model.none"), nullptr);
  EXPECT_EQ(file.find("model.none")->shape, (std::vector<int64_t>{0, 3}));
  EXPECT_EQ(read_back(run, 2), 1);
  // If only one of several ranks writes, the file has no number.
  const std::string alone = fresh_run("one_writer");
  run_ranks(3, [&](Communicator& world) {
    CheckpointStore store(alone, 9);
    store.save(world, state_of(1).state, world.rank() == 1 ? whole_slices(tensors_of(1)) : std::vector<TensorSlice>());
  });
  EXPECT_TRUE(fs::exists(alone + "/checkpoints/step-00000001/model.safetensors"));
  EXPECT_EQ(read_back(alone, 2), 1);
}

// The store writes a slice in pieces no longer than its blocks; the file's header is written at once.
TEST(CheckpointWorlds, NoWriteIsLongerThanABlock) {
  struct Longest : FaultyFiles {
    Longest() : FaultyFiles(FaultyFiles::Fault::kFull, -1) {}
    struct File : OutputFile {
      File(std::unique_ptr<OutputFile> file, size_t& most) : file_(std::move(file)), most_(most) {}
      void write(const void* data, size_t bytes) override {
        if (headers_++ > 0) most_ = std::max(most_, bytes);
        file_->write(data, bytes);
      }
      void sync() override { file_->sync(); }
      void close() override { file_->close(); }
      std::unique_ptr<OutputFile> file_;
      size_t& most_;
      int headers_ = 0;
    };
    std::unique_ptr<OutputFile> create(const std::string& path) override {
      return std::make_unique<File>(FaultyFiles::create(path), most);
    }
    size_t most = 0;
  } files;
  CheckpointStore store(fresh_run("longest"), 1, files, kBlock);
  store.save(*make_self_communicator(), state_of(1).state, whole_slices(tensors_of(1)));
  EXPECT_EQ(files.most, static_cast<size_t>(kBlock));
}

TEST(CheckpointWorlds, RefusesMissingAndRepeatedElements) {
  const std::string run = fresh_run("ranges");
  saved(run, 1, 2);
  const auto refused = [&](int64_t first_end, int64_t second_begin, at::ScalarType second) {
    std::vector<std::string> raised(2);
    run_ranks(2, [&](Communicator& world) {
      CheckpointStore store(run, 2);
      const at::Tensor all = at::arange(20, at::kFloat);
      std::vector<TensorSlice> mine;
      if (world.rank() == 0) mine.push_back({"x", {4, 5}, 0, all.narrow(0, 0, first_end)});
      if (world.rank() == 1) {
        mine.push_back({"x", {4, 5}, second_begin, all.narrow(0, second_begin, 20 - second_begin).to(second)});
      }
      try {
        store.save(world, {.step = 2}, mine);
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kInternal);
        raised[static_cast<size_t>(world.rank())] = error.what();
      }
    });
    EXPECT_EQ(raised[0], raised[1]);
    EXPECT_EQ(names(run).size(), raised[0].empty() ? 2U : 1U);
    return raised[0];
  };
  EXPECT_NE(refused(9, 11, at::kFloat).find("tensor \"x\": elements [9:11] are in no slice"), std::string::npos);
  EXPECT_NE(refused(11, 9, at::kFloat).find("tensor \"x\": elements [9:11] are in several slices"), std::string::npos);
  EXPECT_NE(refused(10, 20, at::kFloat).find("tensor \"x\": elements [10:20] are in no slice"), std::string::npos);
  EXPECT_NE(refused(10, 10, at::kDouble).find("rank 1 has tensor \"x\" of another dtype or shape"), std::string::npos);
  EXPECT_EQ(refused(10, 10, at::kFloat), "") << "nothing is wrong with these";
  const std::vector<TensorSlice> twice(2, {"x", {2}, 0, at::zeros({2})});
  EXPECT_THROW(CheckpointStore(run, 2).save(*make_self_communicator(), {.step = 3}, twice), Error);
}

TEST(CheckpointWorlds, RefusesRanksThatSaveDifferentSteps) {
  const std::string run = fresh_run("steps");
  run_ranks(2, [&](Communicator& world) {
    CheckpointStore store(run, 2);
    expect_error(ErrorKind::kMismatch, {}, [&] { store.save(world, {.step = world.rank()}, {}); });
  });
}

// A flipped bit in each region of each file, a truncated file and a missing file are reported alike on all ranks, and
// the previous checkpoint is used.
TEST(CheckpointWorlds, AllRanksReportTheSameDamage) {
  const std::string run = fresh_run("damage");
  saved(run, 1, 3);
  const std::string folder = saved(run, 2, 3);
  const Manifest manifest = read_manifest(folder);
  std::vector<std::string> skipped;
  const auto expect_found = [&](const std::string& file) {
    EXPECT_EQ(read_back(run, 3, 4, &skipped), 1) << file;
    ASSERT_EQ(skipped.size(), 1U) << file;
    EXPECT_NE(skipped[0].find(folder + "/" + file), std::string::npos) << skipped[0];
  };
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string path = entry.path(), file = entry.path().filename(), good = content(path);
    const size_t header = file == "manifest.json" ? 0 : SafetensorsFile(path).header().size();
    for (const size_t at : {size_t{0}, size_t{9}, header / 2, header, (header + good.size()) / 2, good.size() - 2}) {
      if (good[at] == ' ' || good[at] == '\n') continue;
      flip(path, at);
      expect_found(file);
      put(path, good);
    }
    fs::resize_file(path, good.size() - 2);  // the last byte of a manifest is a newline
    expect_found(file);
    fs::resize_file(path, 0);
    expect_found(file);
    fs::remove(path);
    expect_found(file);
    put(path, good);
  }
  EXPECT_EQ(read_back(run, 3), 2);
  // A damaged slice is named by file, tensor and range.
  for (const ManifestTensor& tensor : manifest.tensors) {
    for (const ManifestSlice& slice : tensor.slices) {
      const std::string path = folder + "/" + slice.file;
      const size_t at = SafetensorsFile(path).find(stored_name(tensor, slice))->offset;
      if (slice.begin == slice.end) continue;
      flip(path, at, 5);
      expect_found(slice.file);
      ASSERT_EQ(skipped.size(), 1U);
      const int64_t end = std::min(slice.end, slice.begin + manifest.block_elements(tensor));
      EXPECT_NE(skipped[0].find(path + ": the checksum of tensor \"" + tensor.name + "\", elements [" +
                                std::to_string(slice.begin) + ":" + std::to_string(end) + "], does not match"),
                std::string::npos)
          << skipped[0];
      flip(path, at, 5);
    }
  }
}

// Each block is verified by one rank, and all ranks verify about the same number of bytes.
TEST(CheckpointWorlds, RanksShareTheVerification) {
  const std::string run = fresh_run("shares");
  const std::string folder = saved(run, 2, 3);
  const Manifest manifest = read_manifest(folder);
  constexpr int kRanks = 4;
  std::vector<int64_t> bytes(kRanks, 0);
  for (const ManifestTensor& tensor : manifest.tensors) {
    for (const ManifestSlice& slice : tensor.slices) {
      const std::string path = folder + "/" + slice.file;
      const size_t begin = SafetensorsFile(path).find(stored_name(tensor, slice))->offset;
      const auto length = static_cast<size_t>(slice.end - slice.begin) * c10::elementSize(tensor.dtype);
      for (size_t at = 0; at < length; at += kBlock) {
        flip(path, begin + at);
        int found = 0;
        for (int rank = 0; rank < kRanks; ++rank) {
          std::vector<std::string> damage;
          CheckpointReader(folder, manifest).check(CheckpointPart::kAll, rank, kRanks, &damage);
          if (damage.empty()) continue;
          ++found;
          bytes[static_cast<size_t>(rank)] += static_cast<int64_t>(std::min<size_t>(kBlock, length - at));
        }
        EXPECT_EQ(found, 1);
        flip(path, begin + at);
      }
    }
  }
  const int64_t total = std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
  for (const int64_t of_rank : bytes) EXPECT_LE(std::abs(of_rank - total / kRanks), 2 * kBlock);
}

TEST(CheckpointWorlds, ReadersReadOnlyTheBlocksThatTheyNeed) {
  const std::string run = fresh_run("needed");
  CheckpointStore store(run, 2, FileSystem::real(), kBlock);
  const std::vector<NamedTensor> tensors = tensors_of(1);
  const std::shared_ptr<Communicator> self = make_self_communicator();
  TrainingState state = state_of(1).state;
  state.folder = store.save(*self, state, whole_slices(tensors));
  // Block 3 of tensor "model.a": elements 48 to 63.
  const std::string path = state.folder + "/model.safetensors";
  flip(path, SafetensorsFile(path).find("model.a")->offset + 3 * kBlock + 17);
  const auto read = [&](int64_t begin, int64_t end) {
    const at::Tensor values = at::zeros({end - begin}, at::kFloat);
    store.read(state, {{"model.a", {7, 19}, begin, values}});
    EXPECT_TRUE(at::equal(values, tensors[0].tensor.view({-1}).narrow(0, begin, end - begin)));
  };
  read(0, 48);
  read(64, 133);
  read(48, 48);
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{47, 49}, {63, 64}, {0, 133}}) {
    EXPECT_EQ(error_text(ErrorKind::kInput, [&] { read(begin, end); }),
              "[checkpoint] " + path + ": the checksum of tensor \"model.a\", elements [48:64], does not match");
  }
  // If one requested tensor has another shape or dtype or is missing, no requested tensor is modified.
  for (const TensorSlice& wrong : {TensorSlice{"model.a", {19, 7}, 0, at::zeros({5})},
                                   TensorSlice{"model.a", {7, 19}, 0, at::zeros({5}, at::kLong)},
                                   TensorSlice{"model.other", {5}, 0, at::zeros({5})}}) {
    const at::Tensor values = at::zeros({5}, at::kBFloat16);
    expect_error(ErrorKind::kInput, {"was it made with another [model]?"}, [&] {
      store.read(state, {{"model.b", {5}, 0, values}, wrong});
    });
    EXPECT_TRUE(at::equal(values, at::zeros({5}, at::kBFloat16)));
  }
}

// Before a save removes old checkpoints, all ranks together verify those that have not been verified yet.
TEST(CheckpointWorlds, DamagedCheckpointsDoNotCountAsKept) {
  const std::string run = fresh_run("kept");
  saved(run, 1, 2);
  saved(run, 2, 2);
  const std::string folder = saved(run, 3, 2);
  const Manifest manifest = read_manifest(folder);
  for (const auto& [name, file] : manifest.files) {
    flip(folder + "/" + name, file.bytes - 1);
    saved(run, 4, 3, 1, 3);
    EXPECT_EQ(names(run),
              (std::vector<std::string>{"step-00000001", "step-00000002", "step-00000003", "step-00000004"}))
        << name;
    flip(folder + "/" + name, file.bytes - 1);
    fs::remove_all(run + "/checkpoints/step-00000004");
  }
  saved(run, 4, 3, 1, 3);
  EXPECT_EQ(names(run), (std::vector<std::string>{"step-00000002", "step-00000003", "step-00000004"}));
}

// Changes the manifest and recomputes its checksum.
void rewrite_manifest(const std::string& folder, const std::function<void(Json&)>& change) {
  const std::string path = folder + "/manifest.json";
  Json manifest = Json::parse(content(path));
  manifest.erase("checksum");
  change(manifest);
  const std::string text = manifest.dump();
  manifest["checksum"] = checksum(text.data(), text.size());
  put(path, manifest.dump(1));
}

TEST(CheckpointWorlds, AcceptsUnknownManifestKeysButNoInvalidOnes) {
  const auto reason = [](const std::function<void(Json&)>& change) -> std::string {
    const std::string run = fresh_run("manifests");
    rewrite_manifest(saved(run, 1, 2), change);
    std::vector<std::string> skipped;
    return read_back(run, 2, 3, &skipped) == 1 ? "" : skipped.at(0);
  };
  EXPECT_EQ(reason([](Json& m) { m["tokenizer"] = {{"digest", "ab"}}; }), "");
  const auto has = [&](const std::function<void(Json&)>& change, const std::string& word) {
    const std::string why = reason(change);
    EXPECT_NE(why.find(word), std::string::npos) << why;
  };
  has([](Json& m) { m["version"] = 3; }, "has version 3, but this program reads versions 1 to 2");
  has([](Json& m) { m["format"] = "other"; }, "is not an annulus checkpoint");
  has([](Json& m) { m["block_bytes"] = 12; }, "blocks of 12 bytes");
  has([](Json& m) { m["tensors"][0]["slices"][0]["end"] = 1; }, "tensor \"model.a\": elements [");
  has([](Json& m) { m["tensors"][0]["slices"][0]["blocks"].push_back("00"); }, "checksums of elements [");
  has([](Json& m) { m["tensors"][0]["slices"][0]["file"] = "other"; }, "which is not one of its files");
  has([](Json& m) { m["files"]["../x"] = {{"bytes", 1}, {"header_xxh3_128", ""}}; }, "it names the file \"../x\"");
  has([](Json& m) { m["tensors"].push_back(m["tensors"][0]); }, "it has tensor \"model.a\" twice");
  has([](Json& m) { m["tensors"][0]["shape"] = {int64_t{1} << 40, int64_t{1} << 40}; }, "a shape that no tensor has");
  has([](Json& m) { m["tensors"][0]["dtype"] = "F8"; }, "has a dtype that is not known");
  has([](Json& m) { m["tensors"].erase(0); }, "holds tensors that the manifest does not name");
}

// Writes a checkpoint as version 1 did: whole tensors with one checksum each, one file for the model and one for the
// optimizer.
void write_version_1(const std::string& run, int64_t step) {
  const std::string folder = run + "/checkpoints/step-0000000" + std::to_string(step);
  fs::create_directories(folder);
  const TrainingState state = state_of(step).state;
  Json manifest = {{"format", "annulus-checkpoint"}, {"version", 1}, {"step", step}, {"extra", state.extra}};
  for (const std::string file : {"model.safetensors", "optimizer.safetensors"}) {
    std::vector<NamedTensor> tensors;
    for (const NamedTensor& t : tensors_of(step)) {
      if (is_optimizer(t.name) != (file == "optimizer.safetensors")) continue;
      tensors.push_back(t);
      manifest["tensors"].push_back({{"name", t.name},
                                     {"dtype", safetensors_dtype(t.tensor.scalar_type())},
                                     {"shape", t.tensor.sizes().vec()},
                                     {"slices",
                                      {{{"file", file},
                                        {"offset", std::vector<int64_t>(t.tensor.sizes().size(), 0)},
                                        {"shape", t.tensor.sizes().vec()},
                                        {"xxh3_128", checksum(t.tensor.const_data_ptr(), t.tensor.nbytes())}}}}});
    }
    write_safetensors(folder + "/" + file, tensors, {{"format", "pt"}});
    const std::string header = SafetensorsFile(folder + "/" + file).header();
    manifest["files"][file] = {{"bytes", fs::file_size(folder + "/" + file)},
                               {"header_xxh3_128", checksum(header.data(), header.size())}};
  }
  put(folder + "/manifest.json", manifest.dump());
  rewrite_manifest(folder, [](Json&) {});
}

// Reads the newest valid checkpoint on `ranks` ranks and returns its step, or -1. Version 1 stored no
// TrainingState::model.
int64_t read_version_1(const std::string& run, int ranks, std::vector<std::string>* skipped = nullptr) {
  std::atomic<int64_t> step = -1;
  run_ranks(ranks, [&](Communicator& world) {
    CheckpointStore store(run, 9);
    std::vector<std::string> lines;
    const auto state = store.open_newest_valid(world, &lines);
    if (world.rank() == 0 && skipped) *skipped = lines;
    if (!state) return;
    step = state->step;
    EXPECT_EQ(state->extra, state_of(state->step).state.extra);
    EXPECT_TRUE(state->model.empty());
    for (const auto& slices : {cut(tensors_of(state->step), 3, 7)[static_cast<size_t>(world.rank())]}) {
      for (const TensorSlice& wanted : slices) {
        const at::Tensor values = at::zeros_like(wanted.values);
        store.read(*state, {{wanted.name, wanted.shape, wanted.begin, values}});
        EXPECT_TRUE(at::equal(values, wanted.values)) << wanted.name;
      }
    }
  });
  return step;
}

TEST(CheckpointWorlds, ReadsCheckpointsOfVersion1) {
  const std::string run = fresh_run("version_1");
  write_version_1(run, 1);
  write_version_1(run, 2);
  for (const int ranks : {1, 2, 3}) EXPECT_EQ(read_version_1(run, ranks), 2);
  const std::string path = run + "/checkpoints/step-00000002/optimizer.safetensors";
  flip(path, fs::file_size(path) - 1);
  std::vector<std::string> skipped;
  EXPECT_EQ(read_version_1(run, 2, &skipped), 1);
  ASSERT_EQ(skipped.size(), 1U);
  EXPECT_NE(skipped[0].find("the checksum of tensor \"optimizer.mask\", elements [0:130], does not match"),
            std::string::npos)
      << skipped[0];
  // The next save writes version 2 beside them.
  saved(run, 3, 2);
  EXPECT_EQ(read_back(run, 3), 3);
  EXPECT_EQ(names(run), (std::vector<std::string>{"step-00000001", "step-00000002", "step-00000003"}));
}

// The files in testdata hold two steps of a tiny model, saved by the program as it was before version 2.
TEST(CheckpointWorlds, ReadsACheckpointWrittenByTheVersion1Program) {
  const std::string run = fresh_run("written_by_version_1"), folder = run + "/checkpoints/step-00000002";
  fs::create_directories(folder);
  for (const char* file : {"manifest.json", "model.safetensors", "optimizer.safetensors"}) {
    fs::copy_file(std::string("tests/runtime/run/testdata/version-1/") + file, folder + "/" + file);
  }
  for (const int ranks : {1, 3}) {
    run_ranks(ranks, [&](Communicator& world) {
      CheckpointStore store(run, 1);
      const auto state = store.open_newest_valid(world, nullptr);
      ASSERT_TRUE(state);
      EXPECT_EQ(state->step, 2);
      EXPECT_EQ(state->extra.at("updates"), "2");
      const SafetensorsFile model(folder + "/model.safetensors"), optimizer(folder + "/optimizer.safetensors");
      for (const SafetensorsFile* file : {&model, &optimizer}) {
        for (const TensorInfo& t : file->tensors()) {
          const at::Tensor whole = file->load(t.name).view({-1});
          const int64_t begin = whole.numel() * world.rank() / ranks, end = whole.numel() * (world.rank() + 1) / ranks;
          const at::Tensor values = at::zeros({end - begin}, at::TensorOptions(t.dtype));
          store.read(*state, {{t.name, t.shape, begin, values}});
          EXPECT_TRUE(at::equal(values, whole.narrow(0, begin, end - begin))) << t.name;
        }
      }
    });
  }
  EXPECT_EQ(read_manifest(folder).tensors.size(), 33U);
}

}  // namespace
}  // namespace annulus::checkpoint_worlds_test
