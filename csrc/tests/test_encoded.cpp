// SPDX-License-Identifier: Apache-2.0
// Encoded pages under the sanitizers: every pattern of bits comes back, what was damaged touches
// nothing outside of the buffers, and copies between blocks and cells are right and alone.
#include <array>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "codec/page_codec.h"
#include "copy/encoded_copier.h"
#include "copy/omp_team.h"
#include "tests/check.h"
#include "tests/damage.h"

namespace {

using attnstore::EncodedCopier;
using attnstore::PageCopy;
using attnstore::PageShape;
using attnstore::codec::decode_page;
using attnstore::codec::encode_page;

void put(Bytes* page, std::uint32_t number) {
  page->push_back(static_cast<std::uint8_t>(number));
  page->push_back(static_cast<std::uint8_t>(number >> 8));
}

/// In just as much memory, so that the sanitizer sees what is read behind it.
Bytes encoded(const Bytes& raw) {
  Bytes out(2 * raw.size() + 16);
  out.resize(encode_page(raw.data(), raw.size(), out.data(), out.size()));
  out.shrink_to_fit();
  return out;
}

bool is_taken(const Bytes& in, Bytes* back) {
  return decode_page(in.data(), in.size(), back->data(), back->size());
}

void comes_back(const Bytes& raw) {
  const Bytes good = encoded(raw);
  CHECK(!good.empty());
  Bytes back(raw.size(), 0xee);
  CHECK(is_taken(good, &back));
  CHECK(back == raw);
  Bytes longer = good;  // a cell has more
  longer.resize(good.size() + 77, 0xff);
  CHECK(is_taken(longer, &back));
  CHECK(back == raw);
  for (const std::size_t cut : {std::size_t{1}, std::size_t{2}, good.size() / 2, good.size()}) {
    if (cut > good.size()) continue;
    const Bytes shorter(good.begin(), good.end() - static_cast<std::ptrdiff_t>(cut));
    CHECK(!is_taken(shorter, &back));
  }
}

/// Numbers around zero of as many scales as there are channels.
Bytes numbers(std::size_t count, std::mt19937_64& random, std::size_t channels = 1) {
  std::normal_distribution<float> normal;
  Bytes made;
  for (std::size_t i = 0; i < count; ++i) {
    const float number = normal(random) * static_cast<float>(1U << i % channels % 8);
    std::uint32_t bits = 0;
    std::memcpy(&bits, &number, sizeof bits);
    put(&made, bits >> 16);
  }
  return made;
}

/// All 65,536, as they follow each other and as no exponent is like the next.
void every_pattern_comes_back() {
  Bytes in_order;
  Bytes apart;
  for (std::uint32_t i = 0; i < 65536; ++i) {
    put(&in_order, i);
    put(&apart, i * 40503U);
  }
  comes_back(in_order);
  comes_back(apart);
  // Each of them beside numbers of other exponents: with a code, and as an escape.
  for (std::uint32_t pattern = 0; pattern < 65536; ++pattern) {
    Bytes raw;
    for (const std::uint32_t other : {0x3f80U, 0xbf00U, 0x0000U, 0x4000U, 0x3e80U}) {
      put(&raw, other);
      put(&raw, pattern);
      put(&raw, other ^ pattern);
    }
    comes_back(raw);
  }
}

/// Windows at both ends of the exponents, and of every width.
void every_window_comes_back() {
  for (std::uint32_t first = 0; first < 256; ++first) {
    for (const std::uint32_t width : {1U, 2U, 6U, 7U, 8U, 9U, 40U}) {
      Bytes raw;
      for (std::uint32_t i = 0; i < 300; ++i) {
        const std::uint32_t exponent = (first + i % width) & 255U;
        put(&raw, exponent << 7 | (i * 77U & 0x7fU) | (i & 1U) << 15);
      }
      comes_back(raw);
    }
  }
}

void sizes_and_contents(std::mt19937_64& random) {
  for (const std::size_t count :
       {1, 2, 7, 8, 9, 255, 256, 257, 263, 264, 511, 512, 1000, 2048, 4096}) {
    for (const std::size_t channels : {1, 3, 64}) comes_back(numbers(count, random, channels));
    comes_back(noise(2 * count, random));
    comes_back(Bytes(2 * count, 0));
    comes_back(Bytes(2 * count, 0xff));
  }
  Bytes none(8);
  CHECK(encode_page(none.data(), 0, none.data(), none.size()) == 0);
  CHECK(!decode_page(none.data(), none.size(), none.data(), 0));
  Bytes odd(600);
  CHECK(encode_page(odd.data(), 299, odd.data() + 300, 300) == 0);
  CHECK(!decode_page(odd.data(), 299, odd.data() + 300, 299));
}

/// What takes more is said, and nothing behind the room is written to.
void too_little_room_is_said(std::mt19937_64& random) {
  for (const std::size_t channels : {1, 64}) {
    const Bytes raw = numbers(1024, random, channels);
    const std::size_t size = encoded(raw).size();
    for (std::size_t room = 0; room <= size + 2; ++room) {
      Bytes out(room);
      out.shrink_to_fit();
      const std::size_t got = encode_page(raw.data(), raw.size(), out.data(), room);
      CHECK(got == (room < size ? 0 : size));
    }
  }
}

/// A base from which a code would lead beyond the last exponent, and wrong numbers of escapes.
void heads_of_groups(std::mt19937_64& random) {
  const Bytes raw = numbers(300, random);
  const Bytes good = encoded(raw);
  const std::size_t bases = 300 + 38 * 3;
  Bytes back(raw.size());
  for (std::uint32_t number = 0; number < 256; ++number) {
    for (const std::size_t group : {0, 1}) {
      Bytes bytes = good;
      bytes[bases + group] = static_cast<std::uint8_t>(number);
      CHECK(is_taken(bytes, &back) == (number <= 249));
      bytes = good;
      bytes.resize(good.size() + 300);  // as in a cell
      bytes[bases + 2 + group] = static_cast<std::uint8_t>(number);
      CHECK(is_taken(bytes, &back) == (number == good[bases + 2 + group]));
    }
  }
}

void numbers_get_smaller(std::mt19937_64& random) {
  const auto part = [&](std::size_t channels) {
    const Bytes raw = numbers(4096, random, channels);
    return static_cast<double>(encoded(raw).size()) / static_cast<double>(raw.size());
  };
  CHECK(part(1) < 0.71);
  CHECK(part(64) < 0.86);
  CHECK(encoded(noise(8192, random)).size() > 8192);
}

/// A decoder stays within its buffers with any input; what it takes is of the right size.
void damaged(std::uint64_t num_inputs, std::mt19937_64& random) {
  std::vector<Bytes> raws;
  for (const std::size_t count : {3, 256, 300, 1024}) {
    for (const std::size_t channels : {1, 64}) raws.push_back(numbers(count, random, channels));
  }
  std::vector<Bytes> goods;
  for (const Bytes& raw : raws) goods.push_back(encoded(raw));
  Outcomes outcomes;
  for (std::uint64_t i = 0; i < num_inputs; ++i) {
    const std::size_t which = random() % raws.size();
    Bytes bytes = random() % 4 == 0 ? noise(random() % 2500 + 1, random) : goods[which];
    if (random() % 4 != 0) {  // bases and numbers of escapes, in front of the escapes
      const std::size_t first = raws[which].size() / 2 + (raws[which].size() / 2 + 7) / 8 * 3;
      if (random() % 2 == 0 && bytes.size() > first) {
        bytes[first + random() % (bytes.size() - first)] = static_cast<std::uint8_t>(random());
      } else {
        damage(bytes, bytes.size(), random);
      }
    }
    Bytes back(raws[which].size());
    back.shrink_to_fit();
    outcomes.count(is_taken(bytes, &back), back, raws[which]);
  }
  outcomes.print("encoded pages");
}

// A team of three, as an OpenMP runtime has.
void three(void (*body)(void*), void* data, unsigned /*num_threads*/, unsigned /*flags*/) {
  std::thread threads[] = {std::thread(body, data), std::thread(body, data)};
  body(data);
  for (auto& thread : threads) thread.join();
}

/// Two layers of blocks in `runs` runs with gaps between them, and slots of cells.
struct World {
  static constexpr std::size_t kBlocks = 5, kSlots = 3, kOfChunk = 2, kLayers = 2;
  std::size_t runs, run_bytes, gap, stride, page_bytes, cell_bytes, slot_bytes;
  std::array<Bytes, kLayers> layers;
  Bytes slots;

  World(std::size_t runs_, std::size_t run_numbers, std::mt19937_64& random)
      : runs(runs_),
        run_bytes(2 * run_numbers),
        gap(6),
        stride(runs * (run_bytes + gap) + 10),
        page_bytes(runs * run_bytes),
        cell_bytes((page_bytes * 74 / 100 + 63) / 64 * 64 + 64),
        slot_bytes(kLayers * kOfChunk * cell_bytes + 32),
        slots(noise(kSlots * slot_bytes, random)) {
    for (Bytes& layer : layers) layer = numbers(kBlocks * stride / 2, random);
  }

  EncodedCopier copier() {
    std::vector<std::uint64_t> offsets;
    for (std::size_t run = 0; run < runs; ++run) offsets.push_back(run * (run_bytes + gap));
    const auto address = [](Bytes& bytes) { return reinterpret_cast<std::uint64_t>(bytes.data()); };
    return EncodedCopier(PageShape{address(slots),
                                   kSlots,
                                   slot_bytes,
                                   kOfChunk * page_bytes,
                                   page_bytes,
                                   {address(layers[0]), address(layers[1])},
                                   kBlocks,
                                   stride,
                                   offsets,
                                   run_bytes},
                         cell_bytes);
  }
};

void copies_come_back_and_nothing_beside_them(std::mt19937_64& random) {
  for (const std::size_t runs : {1, 3}) {
    for (const std::size_t run_numbers : {64, 257, 2048}) {
      World world(runs, run_numbers, random);
      const EncodedCopier copier = world.copier();
      const std::vector<PageCopy> copies = {{2, 0, 1}, {2, 1, 4}, {0, 1, 2}};
      const auto layers = world.layers;
      const Bytes slots = world.slots;
      CHECK(copier.save(copies, {0, 2}).empty());
      CHECK(world.layers == layers);
      const std::size_t cells = World::kOfChunk * world.cell_bytes;
      CHECK(std::equal(slots.begin() + static_cast<std::ptrdiff_t>(world.slot_bytes),
                       slots.begin() + static_cast<std::ptrdiff_t>(2 * world.slot_bytes),
                       world.slots.begin() + static_cast<std::ptrdiff_t>(world.slot_bytes)));
      CHECK(std::equal(slots.end() - 32, slots.end(), world.slots.end() - 32));
      CHECK(cells * 2 + 32 == world.slot_bytes);
      for (const PageCopy& copy : copies) {
        for (std::size_t layer = 0; layer < 2; ++layer) {
          const std::size_t cell =
              layer * World::kOfChunk + static_cast<std::size_t>(copy.block_in_chunk);
          const std::size_t end = static_cast<std::size_t>(copy.slot) * world.slot_bytes +
                                  (cell + 1) * world.cell_bytes;
          for (std::size_t i = 1; i <= 8; ++i) CHECK(world.slots[end - i] == 0);
        }
      }
      for (Bytes& layer : world.layers) {
        for (const PageCopy& copy : copies) {
          for (std::size_t run = 0; run < runs; ++run) {
            std::memset(layer.data() + static_cast<std::size_t>(copy.block_id) * world.stride +
                            run * (world.run_bytes + world.gap),
                        0x55, world.run_bytes);
          }
        }
      }
      copier.load(copies, {1, 2});
      CHECK(world.layers[0] != layers[0]);
      CHECK(world.layers[1] == layers[1]);
      copier.load(copies, {0, 1});
      CHECK(world.layers == layers);
    }
  }
}

/// A cell has the same bytes after anything else that the thread has encoded.
void cells_have_zeros_behind(std::mt19937_64& random) {
  World world(1, 512, random);
  const EncodedCopier copier = world.copier();
  std::fill_n(world.layers[0].begin(), world.page_bytes, std::uint8_t{0});
  CHECK(copier.save({{0, 0, 0}}, {0, 1}).empty());
  const Bytes alone(world.slots.begin(),
                    world.slots.begin() + static_cast<std::ptrdiff_t>(world.cell_bytes));
  CHECK(copier.save({{1, 0, 1}, {0, 0, 0}}, {0, 1}).empty());
  CHECK(std::equal(alone.begin(), alone.end(), world.slots.begin()));
}

/// A page that does not fit is of no use, and the others of the call are.
void what_does_not_fit_is_told(std::mt19937_64& random) {
  World world(1, 512, random);
  const EncodedCopier copier = world.copier();
  const Bytes wild = noise(world.page_bytes, random);
  std::copy(wild.begin(), wild.end(),
            world.layers[1].begin() + static_cast<std::ptrdiff_t>(world.stride));
  const std::vector<PageCopy> copies = {{0, 0, 0}, {1, 0, 1}, {1, 1, 1}, {2, 1, 2}};
  CHECK((copier.save(copies, {0, 2}) == std::vector<std::int64_t>{1}));
  CHECK(copier.save(copies, {0, 1}).empty());
  copier.load({{0, 0, 0}, {2, 1, 2}}, {0, 2});
}

template <typename Error, typename Body>
void raises(Body body) {
  bool raised = false;
  try {
    body();
  } catch (const Error&) {
    raised = true;
  }
  CHECK(raised);
}

void what_is_wrong_is_refused(std::mt19937_64& random) {
  World world(1, 512, random);
  const EncodedCopier copier = world.copier();
  CHECK(copier.save({{0, 0, 0}}, {0, 2}).empty());
  std::fill(world.slots.begin(), world.slots.end(), std::uint8_t{0xff});
  raises<std::runtime_error>([&] { copier.load({{0, 0, 0}}, {0, 2}); });
  raises<std::out_of_range>([&] { copier.load({{3, 0, 0}}, {0, 2}); });
  raises<std::out_of_range>([&] { copier.load({{0, 2, 0}}, {0, 2}); });
  raises<std::out_of_range>([&] { (void)copier.save({{0, 0, 5}}, {0, 2}); });
  raises<std::out_of_range>([&] { (void)copier.save({{0, 0, 0}}, {0, 3}); });
  world.cell_bytes += 64;
  raises<std::invalid_argument>([&] { (void)world.copier(); });
  world.cell_bytes = 0;
  raises<std::invalid_argument>([&] { (void)world.copier(); });
  World odd(1, 64, random);
  odd.page_bytes = odd.run_bytes = 127;
  raises<std::invalid_argument>([&] { (void)odd.copier(); });
}

}  // namespace

int main(int argc, char** argv) {
  std::mt19937_64 random(11);
  every_pattern_comes_back();
  every_window_comes_back();
  sizes_and_contents(random);
  too_little_room_is_said(random);
  heads_of_groups(random);
  numbers_get_smaller(random);
  for (int i = 0; i < 2; ++i) {
    copies_come_back_and_nothing_beside_them(random);
    cells_have_zeros_behind(random);
    what_does_not_fit_is_told(random);
    what_is_wrong_is_refused(random);
    attnstore::use_omp_parallel(three);
  }
  damaged(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 20000, random);
  return 0;
}
