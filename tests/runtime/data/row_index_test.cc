// Tests of runtime/data/row_index.h: packing a corpus into rows, and the index files that keep the result.
#include "runtime/data/row_index.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "common/checksum.h"
#include "common/error.h"
#include "common/interrupt.h"
#include "tests/common/expect_error.h"
#include "tests/common/faulty_files.h"
#include "tests/common/in_child.h"
#include "tests/runtime/data/shards/token_writers.h"

namespace annulus::row_index_test {
namespace {

namespace fs = std::filesystem;

class RowIndexTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = ::testing::TempDir() + "rows";
    fs::remove_all(root_);
    fs::create_directories(root_ + "/index");
  }

  // A corpus with one shard for each list of documents.
  Corpus corpus(const std::vector<Documents>& shards, int64_t max_tokens = 0) {
    fs::remove_all(root_ + "/c");
    for (size_t i = 0; i < shards.size(); ++i) {
      put_file(root_ + "/c/" + std::to_string(1000 + i) + ".tokens", annulus_shard(shards[i], 4, 1 << 30));
    }
    SourceConfig source;
    source.files = {root_ + "/c/*.tokens"};
    return Corpus(source, max_tokens);
  }

  std::vector<std::string> files_of_index() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(root_ + "/index"))
      names.push_back(entry.path().filename().string());
    return names;
  }

  std::string root_;
};

PackSettings settings(int64_t context, Packing packing, bool documents = false, double validation = 0) {
  return {context, packing, documents, validation, false};
}

// Opening verifies only a few blocks; every other block is verified before a row is read from it.
TEST_F(RowIndexTest, RefusesRowsOfADamagedBlock) {
  const Documents documents(120000, Ids{1, 2});
  const Corpus source = corpus({documents});
  const PackSettings packed = settings(8, Packing::kBestFit);
  const std::string path = RowIndex::find_or_make(source, packed, root_ + "/index")->path();
  const int fd = ::open(path.c_str(), O_RDWR);
  // There are 30 blocks of 4,096 pieces of 24 bytes. Opening verifies blocks 0, 1, 3, 5, ...; this damages block 2.
  const off_t at = 64 + (2 * 4096 + 7) * 24;
  char byte = 0;
  ASSERT_EQ(::pread(fd, &byte, 1, at), 1);
  byte = static_cast<char>(byte ^ 4);
  ASSERT_EQ(::pwrite(fd, &byte, 1, at), 1);
  ::close(fd);
  const auto index = RowIndex::find(source, packed, root_ + "/index");
  ASSERT_TRUE(index);
  EXPECT_EQ(index->row(Split::kTrain, 0).size(), 8U);
  const int64_t damaged = (2 * 4096 + 7) / 8;
  expect_error(ErrorKind::kInput, {"damaged"}, [&] { index->row(Split::kTrain, damaged); });
}

// Documents whose tokens are all different, with lengths at and around the limits.
Documents drawn_documents(std::mt19937_64& random, int64_t context, int64_t& id) {
  Documents documents(random() % 40 + 1);
  for (Ids& ids : documents) {
    const uint64_t most[] = {1, 2, 3, static_cast<uint64_t>(context) + 3, 4 * static_cast<uint64_t>(context) + 1};
    ids.resize(random() % most[random() % 5]);
    for (int64_t& token : ids) token = id++;
  }
  return documents;
}

// The targets of some rows, by token id, each with the token that predicts it.
struct Seen {
  std::map<int64_t, int64_t> targets;  // how often
  std::map<int64_t, int64_t> before;   // the token that predicts it
};

void add_row(const Corpus& corpus, const std::set<int64_t>& begins, const RowIndex& index, Split split, int64_t r,
             Seen& seen) {
  int64_t filled = 0;
  for (const Piece& piece : index.row(split, r)) {
    ASSERT_GT(piece.count, 0);
    EXPECT_TRUE(begins.lower_bound(piece.token + 1) == begins.lower_bound(piece.token + piece.count))
        << "the inputs from " << piece.token << " on, " << piece.count << ", are of several documents";
    Ids ids(static_cast<size_t>(piece.count) + 1);
    corpus.read(piece.token, piece.count + 1, ids.data());
    for (size_t i = 1; i < ids.size(); ++i) {
      ++seen.targets[ids[i]];
      seen.before[ids[i]] = ids[i - 1];
    }
    filled += piece.count;
  }
  EXPECT_LE(filled, index.settings().context);
}

Seen part_of(const Corpus& corpus, const RowIndex& index, Split split) {
  Seen seen;
  std::set<int64_t> begins;
  corpus.visit_documents(false, [&](int64_t begin, int64_t length, uint64_t) {
    if (length > 0) begins.insert(begin);
  });
  for (int64_t r = 0; r < index.rows(split); ++r) add_row(corpus, begins, index, split, r, seen);
  const PartCounts& counts = index.counts(split);
  EXPECT_EQ(static_cast<int64_t>(seen.targets.size()), counts.targets);
  EXPECT_EQ(counts.targets + counts.first_tokens + counts.lone_tokens, counts.tokens);
  for (const auto& [token, times] : seen.targets) EXPECT_EQ(times, 1) << token;
  return seen;
}

TEST_F(RowIndexTest, EachTokenIsATargetOnceOrNever) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 120; ++round) {
    const auto packing = static_cast<Packing>(round % 3);
    const bool documents = round % 2 == 0 || packing != Packing::kStream;
    const auto context = static_cast<int64_t>(random() % 20 + 1);
    int64_t id = 0;
    std::vector<Documents> shards(random() % 3 + 1);
    for (Documents& shard : shards) shard = drawn_documents(random, context, id);
    if (id == 0) continue;
    const Corpus source = corpus(shards);
    const double fraction = round % 4 == 0 ? 0 : 0.3;
    const PackSettings s = settings(context, packing, documents, fraction);
    const auto in_memory = RowIndex::make(source, s);
    const auto on_disk = RowIndex::find_or_make(source, s, root_ + "/index");
    in_memory->verify();
    on_disk->verify();
    EXPECT_EQ(in_memory->digest(), on_disk->digest());

    const Seen train = part_of(source, *on_disk, Split::kTrain),
               held_out = part_of(source, *on_disk, Split::kValidation);
    for (const Split split : {Split::kTrain, Split::kValidation}) {
      ASSERT_EQ(in_memory->rows(split), on_disk->rows(split));
      for (int64_t r = 0; r < in_memory->rows(split); ++r) EXPECT_EQ(in_memory->row(split, r), on_disk->row(split, r));
    }
    // Which tokens are not targets follows from the definition.
    int64_t documents_seen = 0;
    const Documents all = [&] {
      Documents joined_shards;
      for (const Documents& shard : shards) joined_shards.insert(joined_shards.end(), shard.begin(), shard.end());
      return joined_shards;
    }();
    const int64_t cut = id - static_cast<int64_t>(std::ceil(static_cast<double>(id) * fraction));
    int last_part = -1;
    for (const Ids& ids : all) {
      bool is_held_out = static_cast<double>(hash_of(ids)) * 0x1p-64 < fraction;
      documents_seen += 1;
      for (size_t i = 0; i < ids.size(); ++i) {
        if (on_disk->tail_held_out()) is_held_out = ids[i] >= cut;
        const Seen& its = is_held_out ? held_out : train;
        const Seen& other = is_held_out ? train : held_out;
        EXPECT_EQ(other.targets.count(ids[i]), 0u);
        const bool first = (documents && i == 0) || last_part != static_cast<int>(is_held_out);
        EXPECT_EQ(its.targets.count(ids[i]), first ? 0u : 1u) << ids[i];
        if (!first) {
          EXPECT_EQ(its.before.at(ids[i]), ids[i] - 1);
        }
        last_part = static_cast<int>(is_held_out);
      }
    }
    const PartCounts& a = on_disk->counts(Split::kTrain);
    const PartCounts& b = on_disk->counts(Split::kValidation);
    EXPECT_EQ(a.tokens + b.tokens, id);
    EXPECT_GE(a.documents + b.documents, documents_seen);
    EXPECT_LE(a.documents + b.documents, documents_seen + 1);  // the tail may cut one document in two
    fs::remove(on_disk->path());
  }
}

TEST_F(RowIndexTest, GrowingCorpusKeepsItsHeldOutDocuments) {
  std::mt19937_64 random(5);
  int64_t id = 0;
  std::vector<Documents> shards;
  std::set<int64_t> held_out, trained;
  for (int growth = 0; growth < 4; ++growth) {
    Documents documents(200);
    for (Ids& ids : documents) {
      ids.resize(random() % 20 + 2);
      for (int64_t& token : ids) token = id++;
    }
    shards.insert(shards.begin(), documents);  // the new file comes before the others
    const Corpus source = corpus(shards);
    const auto index = RowIndex::make(source, settings(16, Packing::kBestFit, true, 0.1));
    EXPECT_FALSE(index->tail_held_out());
    const Seen validation = part_of(source, *index, Split::kValidation), train = part_of(source, *index, Split::kTrain);
    const auto share = static_cast<double>(index->counts(Split::kValidation).documents) / (200.0 * (growth + 1));
    EXPECT_GT(share, 0.03);
    EXPECT_LT(share, 0.2);
    for (const int64_t token : held_out) EXPECT_EQ(validation.targets.count(token), 1u);
    for (const int64_t token : trained) EXPECT_EQ(train.targets.count(token), 1u);
    for (const auto& [token, times] : validation.targets) held_out.insert(token);
    for (const auto& [token, times] : train.targets) trained.insert(token);
  }
}

TEST_F(RowIndexTest, HoldsOutTheTailIfNoDocumentIs) {
  Ids ids(1001);
  std::iota(ids.begin(), ids.end(), 0);
  const Corpus source = corpus({{ids}});
  const auto index = RowIndex::make(source, settings(100, Packing::kStream, false, 0.25));
  EXPECT_TRUE(index->tail_held_out());
  EXPECT_EQ(index->counts(Split::kValidation).tokens, 251);  // rounded up
  EXPECT_EQ(index->row(Split::kValidation, 0)[0], (Piece{750, 100}));
  EXPECT_EQ(index->row(Split::kTrain, 7), (std::vector<Piece>{{700, 49}}));
  EXPECT_EQ(RowIndex::make(source, settings(100, Packing::kStream))->counts(Split::kValidation).tokens, 0);
}

TEST_F(RowIndexTest, RefusesLongDocumentsIfConfigured) {
  const Corpus source = corpus({{{1, 2, 3}, Ids(11, 4)}});
  PackSettings s = settings(10, Packing::kBestFit);
  s.refuse_long = true;
  EXPECT_EQ(RowIndex::make(source, s)->rows(Split::kTrain), 2);
  s.context = 9;
  for (const Packing packing : {Packing::kBestFit, Packing::kDocument}) {
    s.packing = packing;
    expect_error(ErrorKind::kInput, {"1000.tokens, token 3 (byte 4,108) has 11 tokens, but a row takes 10"},
                 [&] { RowIndex::find_or_make(source, s, root_ + "/index"); });
  }
  EXPECT_TRUE(files_of_index().empty());
  s.packing = Packing::kStream;
  EXPECT_EQ(RowIndex::make(source, s)->rows(Split::kTrain), 2);
}

TEST_F(RowIndexTest, IndexIsFoundByTokensAndSettings) {
  const std::vector<Documents> shards{{{1, 2, 3}, {4, 5}, {6, 7, 8, 9}}};
  const std::string folder = root_ + "/index";
  const PackSettings s = settings(4, Packing::kBestFit);
  EXPECT_EQ(RowIndex::find(corpus(shards), s, folder), nullptr);
  const std::string path = RowIndex::find_or_make(corpus(shards), s, folder)->path();
  EXPECT_EQ(files_of_index(), (std::vector<std::string>{fs::path(path).filename().string()}));
  const auto inode = [&] {
    struct stat status {};
    EXPECT_EQ(stat(path.c_str(), &status), 0);
    return status.st_ino;
  };
  const auto before = inode();
  EXPECT_EQ(RowIndex::find_or_make(corpus(shards), s, folder)->path(), path);
  EXPECT_EQ(inode(), before);
  EXPECT_EQ(RowIndex::find(corpus(shards), s, folder)->settings(), s);
  // Other tokens or settings have another index.
  EXPECT_EQ(RowIndex::find(corpus({{{1, 2, 3}, {4, 5}, {6, 7, 8, 10}}}), s, folder), nullptr);
  EXPECT_EQ(RowIndex::find(corpus(shards, 8), s, folder), nullptr);
  for (PackSettings other :
       {settings(5, Packing::kBestFit), settings(4, Packing::kDocument), settings(4, Packing::kBestFit, true, 0.5)}) {
    EXPECT_EQ(RowIndex::find(corpus(shards), other, folder), nullptr) << other.text();
  }
}

TEST_F(RowIndexTest, DamagedIndexIsRebuilt) {
  std::mt19937_64 random(3);
  int64_t id = 0;
  Documents documents;
  for (int i = 0; i < 20; ++i) {
    const Documents more = drawn_documents(random, 8, id);
    documents.insert(documents.end(), more.begin(), more.end());
  }
  const Corpus source = corpus({documents});
  const PackSettings s = settings(8, Packing::kBestFit, true, 0.2);
  const std::string folder = root_ + "/index";
  const std::string path = RowIndex::find_or_make(source, s, folder)->path();
  std::ifstream in(path, std::ios::binary);
  const std::string good((std::istreambuf_iterator<char>(in)), {});
  std::vector<std::string> bad{"",
                               good.substr(0, 100),
                               good.substr(0, good.size() - 1),
                               good + "x",
                               good.substr(0, good.size() - 24),
                               std::string(good.size(), '\0')};
  for (size_t at = 0; at < good.size(); at += 1 + random() % 40) {
    bad.push_back(good);
    bad.back()[at] = static_cast<char>(bad.back()[at] ^ (1 << random() % 8));
  }
  for (const std::string& bytes : bad) {
    put_file(path, bytes);
    EXPECT_EQ(RowIndex::find(source, s, folder), nullptr);
    RowIndex::find_or_make(source, s, folder)->verify();
    std::ifstream again(path, std::ios::binary);
    EXPECT_EQ(std::string((std::istreambuf_iterator<char>(again)), {}), good);
  }
  // An index of other tokens under this name is not used.
  const Corpus other = corpus({{{1, 2, 3}}});
  fs::copy_file(RowIndex::find_or_make(other, s, folder)->path(), path, fs::copy_options::overwrite_existing);
  EXPECT_EQ(RowIndex::find(source, s, folder), nullptr);
}

TEST_F(RowIndexTest, RefusesAnIndexThatChangesDuringTheRun) {
  const Corpus source = corpus({{{1, 2, 3}, {4, 5}}});
  const auto index = RowIndex::find_or_make(source, settings(4, Packing::kDocument), root_ + "/index");
  EXPECT_EQ(index->row(Split::kTrain, 0), (std::vector<Piece>{{0, 2}}));
  fs::resize_file(index->path(), 80);
  EXPECT_THROW(index->row(Split::kTrain, 1), Error);
}

TEST_F(RowIndexTest, FaultsLeaveNoPartialIndex) {
  std::mt19937_64 random(9);
  int64_t id = 0;
  // The corpus is long enough for held-out pieces to go through a file of their own.
  Documents documents(12000);
  for (Ids& ids : documents) {
    ids.resize(2 + random() % 3);
    for (int64_t& token : ids) token = id++;
  }
  const Corpus source = corpus({documents});
  const PackSettings s = settings(8, Packing::kBestFit, true, 0.4);
  const std::string folder = root_ + "/index";
  int operations = 0;
  for (int fault = -1; fault < operations || fault < 0; ++fault) {
    FaultyFiles files(FaultyFiles::Fault::kFull, fault);
    std::shared_ptr<const RowIndex> index;
    try {
      index = RowIndex::find_or_make(source, s, folder, files);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kResource) << error.what();
    }
    if (fault < 0) {
      operations = files.operations();
      EXPECT_GT(operations, 10);
      EXPECT_GT(index->counts(Split::kValidation).documents, 4096);
    }
    for (const std::string& name : files_of_index()) {
      // The operation that failed may be the removal of this temporary file, which is never read.
      if (name.ends_with(".held-out")) continue;
      EXPECT_EQ(name, RowIndex::file_name(RowIndex::make(source, s)->digest())) << fault;
      const auto found = RowIndex::find(source, s, folder);
      ASSERT_NE(found, nullptr) << fault;
      found->verify();
    }
    fs::remove_all(folder);
    fs::create_directories(folder);
  }
}

TEST_F(RowIndexTest, InterruptLeavesNoFile) {
  const Corpus source = corpus({Documents(70000, Ids{1, 2})});
  in_child([&]() -> std::string {
    install_interrupt_handlers();
    kill(getpid(), SIGINT);
    while (!interrupted()) std::this_thread::yield();
    try {
      RowIndex::find_or_make(source, settings(8, Packing::kBestFit), root_ + "/index");
      return "packing was not interrupted";
    } catch (const Error& error) {
      return files_of_index().empty() ? "" : "left " + files_of_index()[0];
    }
  });
}

TEST_F(RowIndexTest, CreatesTheFolderButNotItsParents) {
  const Corpus source = corpus({{{1, 2, 3}}});
  const PackSettings s = settings(4, Packing::kDocument);
  EXPECT_EQ(RowIndex::find_or_make(source, s, root_ + "/new")->rows(Split::kTrain), 1);
  expect_error(ErrorKind::kResource, {}, [&] { RowIndex::find_or_make(source, s, root_ + "/not/there"); });
}

// The index holds 1e9 documents, one per row; all blocks except the last are a hole in the file.
TEST_F(RowIndexTest, OpeningAHugeIndexReadsABoundedPart) {
  const int64_t documents = 1000000000, block = 4096, piece = 24;
  const Corpus source = corpus({{{1, 2, 3}}});
  const PackSettings s = settings(2, Packing::kDocument);
  const std::string folder = root_ + "/index";
  const std::string path = RowIndex::find_or_make(source, s, folder)->path();
  std::ifstream in(path, std::ios::binary);
  const std::string small((std::istreambuf_iterator<char>(in)), {});
  // The small file consists of the head, one piece, one hash, one window and the tail.
  const std::string head = small.substr(0, 64);
  std::string tail = small.substr(64 + 24 + 8 + 8);
  ASSERT_EQ(tail.size(), 224u);
  const int64_t blocks = (documents + block - 1) / block, last = documents - (blocks - 1) * block;
  const std::string hole(static_cast<size_t>(block * piece), '\0');
  std::vector<uint64_t> tables(static_cast<size_t>(blocks), hash64(hole.data(), hole.size()));
  std::string end;
  for (int64_t i = 0; i < last; ++i) {
    const uint64_t row = static_cast<uint64_t>(documents - last + i);
    for (const uint64_t word : {row * 3, row * 2, uint64_t{2}}) put_value(end, word);
  }
  tables.back() = hash64(end.data(), end.size());
  const auto set = [&](size_t at, int64_t value) { std::memcpy(tail.data() + at, &value, 8); };
  set(32 + 48, documents);           // pieces of training
  set(32 + 48 + 8, documents);       // documents
  set(32 + 48 + 24, documents);      // rows
  set(32 + 48 + 32, documents * 2);  // targets
  set(32 + 48 + 112, 0);             // windows
  set(32 + 48 + 120, static_cast<int64_t>(hash64(tables.data(), tables.size() * 8)));
  set(216, static_cast<int64_t>(hash64(tail.data(), 216)));
  fs::remove(path);
  put_file(path, head);
  fs::resize_file(path, static_cast<uint64_t>(64 + (documents - last) * piece));
  std::ofstream out(path, std::ios::binary | std::ios::app);
  out << end;
  out.write(reinterpret_cast<const char*>(tables.data()), static_cast<std::streamsize>(tables.size() * 8));
  out << tail;
  out.close();

  const auto index = RowIndex::find(source, s, folder);
  ASSERT_NE(index, nullptr);
  EXPECT_EQ(index->rows(Split::kTrain), documents);
  EXPECT_EQ(index->row(Split::kTrain, documents - 1), (std::vector<Piece>{{3 * (documents - 1), 2}}));
  // The pages that were read are resident; they are less than a hundredth of the file.
  const int fd = open(path.c_str(), O_RDONLY);
  const auto size = fs::file_size(path);
  void* map = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  ASSERT_NE(map, MAP_FAILED);
  std::vector<unsigned char> resident((size + 4095) / 4096);
  ASSERT_EQ(mincore(map, size, resident.data()), 0);
  EXPECT_LT(std::count_if(resident.begin(), resident.end(), [](unsigned char c) { return c & 1; }),
            static_cast<std::ptrdiff_t>(resident.size() / 100));
  munmap(map, size);
  close(fd);
  fs::remove(path);
}

}  // namespace
}  // namespace annulus::row_index_test
