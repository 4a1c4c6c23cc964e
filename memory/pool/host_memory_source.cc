// See host_memory_source.h.
#include "memory/pool/host_memory_source.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "memory/numa.h"

namespace annulus {
namespace {

constexpr int64_t kHugePage = 2 << 20;

// Whether the C library asks for huge pages, as the script `annulus` tells it to: then the pool does the same.
bool wants_huge_pages() {
  static const bool wants = [] {
    const char* const tunables = std::getenv("GLIBC_TUNABLES");
    return tunables != nullptr && std::strstr(tunables, "glibc.malloc.hugetlb=1") != nullptr;
  }();
  return wants;
}

}  // namespace

// At the beginning of a chunk; its blocks follow.
struct alignas(kBlockAlignment) HostMemorySource::Chunk {
  int size_class = 0;
  int64_t used = 0;                            // blocks
  int64_t end = sizeof(Chunk);                 // where blocks begin that were never used
  void* returned = nullptr;                    // a block that was; each holds the address of the next
  Chunk *previous = nullptr, *next = nullptr;  // among those of the class with room

  bool has_room() const { return returned != nullptr || end + class_bytes(size_class) <= kChunk; }
};

HostMemorySource::~HostMemorySource() {
  if (spare_ != nullptr) munmap(spare_, static_cast<size_t>(kChunk));
}

void* HostMemorySource::take(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (bytes >= kOwnPages) return map(bytes, bytes >= kHugePage && wants_huge_pages() ? kHugePage : 1);
  const int of_class = size_class(bytes);
  Chunk* chunk = open_[static_cast<size_t>(of_class)];
  if (chunk == nullptr) chunk = make_chunk(of_class);
  if (chunk == nullptr) return nullptr;
  void* block = chunk->returned;
  if (block != nullptr) {
    chunk->returned = *static_cast<void**>(block);
  } else {
    block = reinterpret_cast<char*>(chunk) + std::exchange(chunk->end, chunk->end + class_bytes(of_class));
  }
  ++chunk->used;
  if (!chunk->has_room()) remove_from_open(*chunk);
  return block;
}

void HostMemorySource::give_back(void* block, int64_t bytes) {
  if (bytes >= kOwnPages) {
    munmap(block, static_cast<size_t>(bytes));
    return;
  }
  const std::lock_guard lock(mutex_);
  auto* const chunk =
      reinterpret_cast<Chunk*>(reinterpret_cast<uintptr_t>(block) & ~static_cast<uintptr_t>(kChunk - 1));
  if (!chunk->has_room()) add_to_open(*chunk);
  *static_cast<void**>(block) = std::exchange(chunk->returned, block);
  if (--chunk->used > 0) return;
  remove_from_open(*chunk);
  if (spare_ == nullptr) {
    spare_ = chunk;
  } else {
    munmap(chunk, static_cast<size_t>(kChunk));
  }
}

void HostMemorySource::set_nodes(std::vector<int> nodes) {
  const std::lock_guard lock(mutex_);
  nodes_ = std::move(nodes);
  if (spare_ != nullptr) munmap(std::exchange(spare_, nullptr), static_cast<size_t>(kChunk));
}

// Null if the system refuses. The alignment is 1, for that of a page, or a larger power of two.
void* HostMemorySource::map(int64_t bytes, int64_t alignment) const {
  const auto size = static_cast<size_t>(bytes), more = static_cast<size_t>(alignment - 1);
  void* const pages = mmap(nullptr, size + more, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) return nullptr;
  auto* begin = static_cast<char*>(pages);
  if (more > 0) {  // what lies before and behind the aligned part is not needed
    const size_t before = (-reinterpret_cast<uintptr_t>(begin)) & more;
    if (before > 0) munmap(begin, before);
    begin += before;
    if (more > before) munmap(begin + size, more - before);
  }
  if (alignment == kHugePage) madvise(begin, size, MADV_HUGEPAGE);
  if (!nodes_.empty()) bind_pages(begin, bytes, nodes_);
  return begin;
}

HostMemorySource::Chunk* HostMemorySource::make_chunk(int of_class) {
  void* const memory = spare_ != nullptr ? std::exchange(spare_, nullptr) : map(kChunk, kChunk);
  if (memory == nullptr) return nullptr;
  auto* const chunk = new (memory) Chunk{.size_class = of_class};
  add_to_open(*chunk);
  return chunk;
}

void HostMemorySource::add_to_open(Chunk& chunk) {
  Chunk*& first = open_[static_cast<size_t>(chunk.size_class)];
  chunk.previous = nullptr;
  chunk.next = first;
  if (first != nullptr) first->previous = &chunk;
  first = &chunk;
}

void HostMemorySource::remove_from_open(Chunk& chunk) {
  if (chunk.previous != nullptr) {
    chunk.previous->next = chunk.next;
  } else {
    open_[static_cast<size_t>(chunk.size_class)] = chunk.next;
  }
  if (chunk.next != nullptr) chunk.next->previous = chunk.previous;
}

}  // namespace annulus
