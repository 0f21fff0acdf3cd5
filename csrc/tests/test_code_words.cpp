// SPDX-License-Identifier: Apache-2.0
// What a warp does with cells, under the sanitizers: byte for byte what the processor's codec does,
// and no content of a cell leads outside of the cell and the page. Each thread of the host does the
// work of a warp (cuda/lanes.h).
#include <cstring>
#include <vector>

#include "codec/page_codec.h"
#include "cuda/code_words.h"
#include "cuda/copy_jobs.h"
#include "tests/check.h"
#include "tests/damage.h"

namespace {

using attnstore::CodeJob;
using attnstore::CopyArrays;
using attnstore::Offsets;
using attnstore::PageShape;
using attnstore::PageSides;

/// Memory of just so many bytes, 16 bytes aligned.
struct Memory {
  explicit Memory(std::size_t size) : words(size / 16 + 1), size(size) {}
  std::uint8_t* data() { return reinterpret_cast<std::uint8_t*>(words.data()); }
  [[nodiscard]] std::uint64_t address() { return reinterpret_cast<std::uint64_t>(data()); }
  std::vector<attnstore::Word16> words;
  const std::size_t size;
};

/// One page, one layer: a block whose runs lie apart, and a cell.
class World {
 public:
  World(std::size_t page_bytes, std::size_t num_runs, std::size_t cell_bytes)
      : page_(page_bytes),
        run_bytes_(page_bytes / num_runs),
        stride_(run_bytes_ + 16),
        block_(num_runs * stride_),
        cell_((cell_bytes + 63) / 64 * 64) {
    CHECK(run_bytes_ * num_runs == page_bytes);
    PageShape blocks{cell_.address(),    1, cell_.size,  page_bytes, page_bytes,
                     {block_.address()}, 1, block_.size, {},         run_bytes_};
    for (std::size_t run = 0; run < num_runs; ++run) blocks.run_offsets.push_back(run * stride_);
    PageShape cells = blocks;
    cells.page_bytes = cells.run_bytes = cells.layer_bytes = cell_.size;
    cells.run_offsets = {0};
    sides_ = {blocks, cells};
  }

  bool encode(const Bytes& raw) {
    for (std::size_t i = 0; i < page_; ++i) *byte(i) = raw[i];
    return run(attnstore::Place::kBlock, attnstore::Place::kSlot, false);
  }

  bool decode() { return run(attnstore::Place::kSlot, attnstore::Place::kBlock, true); }

  Bytes page() {
    Bytes found(page_);
    for (std::size_t i = 0; i < page_; ++i) found[i] = *byte(i);
    return found;
  }
  Bytes cell() { return {cell_.data(), cell_.data() + cell_.size}; }
  void put(const Bytes& bytes) { std::memcpy(cell_.data(), bytes.data(), cell_.size); }
  [[nodiscard]] std::size_t cell_bytes() const { return cell_.size; }

  /// What lies between the runs stays.
  bool is_alone() {
    for (std::size_t at = 0; at < block_.size; ++at) {
      if (at % stride_ >= run_bytes_ && block_.data()[at] != 0) return false;
    }
    return true;
  }

 private:
  std::uint8_t* byte(std::size_t i) {
    return block_.data() + i / run_bytes_ * stride_ + i % run_bytes_;
  }

  bool run(attnstore::Place source, attnstore::Place target, bool is_decoding) {
    const attnstore::PageTable table{{{0, 0, 0}}, {}};
    const std::vector<Offsets> pages = attnstore::first_runs(sides_, source, target, table);
    const attnstore::CopyOffsets offsets = attnstore::offsets_of(sides_, source, target);
    const CopyArrays arrays{pages.data(), offsets.layers.data(), offsets.runs.data()};
    std::uint32_t failed = 0;
    const auto address = reinterpret_cast<std::uint64_t>(&failed);
    const bool is_wide = run_bytes_ % 16 == 0;
    for (const CodeJob& job :
         attnstore::make_code_jobs(sides_, arrays, 1, {0, 1}, is_decoding, address)) {
      for (std::uint32_t thread = 0; thread < 128; ++thread) {
        if (is_decoding && is_wide) {
          attnstore::code_words<attnstore::Word16, true>(job, thread, 128);
        } else if (is_decoding) {
          attnstore::code_words<std::uint16_t, true>(job, thread, 128);
        } else if (is_wide) {
          attnstore::code_words<attnstore::Word16, false>(job, thread, 128);
        } else {
          attnstore::code_words<std::uint16_t, false>(job, thread, 128);
        }
      }
    }
    return failed == 0;
  }

  const std::size_t page_;
  const std::size_t run_bytes_;
  const std::size_t stride_;
  Memory block_;
  Memory cell_;
  PageSides sides_;
};

void put(Bytes* page, std::uint32_t number) {
  page->push_back(static_cast<std::uint8_t>(number));
  page->push_back(static_cast<std::uint8_t>(number >> 8));
}

Bytes numbers(std::size_t count, std::mt19937_64& random, float spread = 1) {
  std::normal_distribution<float> normal;
  Bytes made;
  for (std::size_t i = 0; i < count; ++i) {
    const float number = normal(random) * (random() % 16 == 0 ? spread : 1);
    std::uint32_t bits = 0;
    std::memcpy(&bits, &number, sizeof bits);
    put(&made, bits >> 16);
  }
  return made;
}

/// As the processor has it, with zeros behind; or refused by both.
void is_the_same(const Bytes& raw, std::size_t num_runs, std::size_t room) {
  World world(raw.size(), num_runs, room);
  Bytes wanted(world.cell_bytes(), 0);
  const std::size_t size =
      attnstore::codec::encode_page(raw.data(), raw.size(), wanted.data(), wanted.size());
  CHECK(world.encode(raw) == (size != 0));
  if (size == 0) {
    CHECK(!world.decode());
    return;
  }
  std::memset(wanted.data() + size, 0, wanted.size() - size);
  CHECK(world.cell() == wanted);
  CHECK(world.encode(Bytes(raw.size(), 0)));
  world.put(wanted);
  CHECK(world.decode());
  CHECK(world.page() == raw);
  CHECK(world.is_alone());
}

void every_pattern_is_the_same() {
  Bytes in_order;
  Bytes apart;
  for (std::uint32_t i = 0; i < 65536; ++i) {
    put(&in_order, i);
    put(&apart, i * 40503U);
  }
  for (const std::size_t runs : {1, 8, 32768}) {
    is_the_same(in_order, runs, 3 * in_order.size());
    is_the_same(apart, runs, 3 * apart.size());
  }
}

void every_window_is_the_same() {
  for (std::uint32_t first = 0; first < 256; ++first) {
    for (const std::uint32_t width : {1U, 2U, 6U, 7U, 8U, 9U, 40U}) {
      Bytes raw;
      for (std::uint32_t i = 0; i < 304; ++i) {
        const std::uint32_t exponent = (first + i % width) & 255U;
        put(&raw, exponent << 7 | (i * 77U & 0x7fU) | (i & 1U) << 15);
      }
      is_the_same(raw, 1, 2 * raw.size());
    }
  }
}

void sizes_are_the_same(std::mt19937_64& random) {
  for (const std::size_t count :
       {1, 2, 3, 7, 8, 9, 12, 255, 256, 257, 260, 264, 511, 512, 1000, 2048, 2052, 4096, 9000}) {
    for (const std::size_t runs : {std::size_t{1}, count % 4 == 0 ? std::size_t{4} : 1, count}) {
      for (const float spread : {1.0F, 1e3F, 1e30F}) {
        const Bytes raw = numbers(count, random, spread);
        is_the_same(raw, runs, raw.size() * 74 / 100);
        is_the_same(raw, runs, 3 * raw.size());
      }
      is_the_same(noise(2 * count, random), runs, 6 * count);
      is_the_same(Bytes(2 * count, 0), runs, 2 * count * 74 / 100);
      is_the_same(Bytes(2 * count, 0xff), runs, 2 * count * 74 / 100);
    }
  }
}

/// Taken or refused as by the processor, and then the same page.
void damaged(std::uint64_t count, std::mt19937_64& random) {
  Outcomes outcomes;
  const std::vector<std::size_t> sizes = {8, 64, 257, 260, 2048, 2304, 6000};
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::size_t size = sizes[i % sizes.size()];
    const Bytes raw = numbers(size, random, i % 3 == 0 ? 1e3F : 1);
    World world(2 * size, size % 8 == 0 ? 2 : 1, 2 * size * 74 / 100);
    if (!world.encode(raw)) continue;
    Bytes bytes = world.cell();
    for (std::uint64_t again = random() % 3 + 1; again > 0; --again) {
      const std::size_t whole = bytes.size();
      damage(bytes, whole, random);
      const Bytes behind = noise(whole, random);
      for (std::size_t at = bytes.size(); at < whole; ++at) bytes.push_back(behind[at]);
      bytes.resize(whole);
    }
    if (random() % 2 == 0) {  // where bases and counts are
      bytes[size + (size + 7) / 8 * 3 + random() % 4 % (bytes.size() - size)] ^= 0x7f;
    }
    world.put(bytes);
    Bytes wanted(2 * size, 0);
    const bool is_page =
        attnstore::codec::decode_page(bytes.data(), bytes.size(), wanted.data(), wanted.size());
    const bool is_taken = world.decode();
    CHECK(is_taken == is_page);
    CHECK(world.is_alone());
    CHECK(world.cell() == bytes);
    if (is_taken) CHECK(world.page() == wanted);
    outcomes.count(is_taken, world.page(), raw);
  }
  outcomes.print("cells, by a warp");
}

}  // namespace

int main(int argc, char** argv) {
  std::mt19937_64 random(12);
  every_pattern_is_the_same();
  every_window_is_the_same();
  sizes_are_the_same(random);
  damaged(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 20000, random);
  return 0;
}
