// SPDX-License-Identifier: Apache-2.0
// A part of rotate_body.h: K and V whose dims stand side by side.

namespace attnstore {
namespace ATTNSTORE_PROCESSOR {
namespace {

// Several NeoX pairs of one token.
template <typename Element, typename Bits>
__attribute__((noinline)) void rotate_halves(const Bits* __restrict x1, const Bits* __restrict x2,
                                             Bits* __restrict y1, Bits* __restrict y2,
                                             std::int64_t count, const float* __restrict cosines,
                                             const float* __restrict sines) {
  for (std::int64_t i = 0; i < count; ++i) {
    rotate_pair<Element>(x1[i], x2[i], cosines[i], sines[i], &y1[i], &y2[i]);
  }
}

// Several GPT-J pairs of one token.
template <typename Element, typename Bits>
__attribute__((noinline)) void rotate_neighbours(const Bits* __restrict x, Bits* __restrict y,
                                                 std::int64_t count,
                                                 const float* __restrict cosines,
                                                 const float* __restrict sines) {
  for (std::int64_t i = 0; i < count; ++i) {
    rotate_pair<Element>(x[2 * i], x[2 * i + 1], cosines[i], sines[i], &y[2 * i], &y[2 * i + 1]);
  }
}

// Loops in steps that fill vectors; the last step overlaps the one before it, since what it does
// twice is the same.
template <typename Loop>
inline void in_steps(std::int64_t count, const Loop& loop) {
  constexpr std::int64_t kStep = 32;
  constexpr std::int64_t kSmallStep = 8;
  const std::int64_t step = count >= kStep ? kStep : kSmallStep;
  if (count < step) {
    loop(0, count);
    return;
  }
  const std::int64_t whole = count / step * step;
  loop(0, whole);
  if (whole != count) loop(count - step, step);
}

// K of one token and head; `x` and `y` are its dims.
template <typename Element>
void key_row(const BlockShape& shape, const float* angles, const typename Element::Bits* x,
             typename Element::Bits* y) {
  using Bits = typename Element::Bits;
  const auto row_bytes = static_cast<std::size_t>(shape.head_dim) * sizeof(Bits);
  if (angles == nullptr) {
    put(y, x, row_bytes);
    return;
  }
  alignas(64) Bits row[kHeadDimMax];
  const std::int64_t pairs = shape.num_pairs;
  in_steps(pairs, [&](std::int64_t first, std::int64_t count) {
    const float* const cosines = angles + first;
    const float* const sines = angles + pairs + first;
    if (shape.pairing == Pairing::kNeox) {
      rotate_halves<Element>(x + first, x + pairs + first, row + first, row + pairs + first, count,
                             cosines, sines);
    } else {
      rotate_neighbours<Element>(x + 2 * first, row + 2 * first, count, cosines, sines);
    }
  });
  const auto turned = static_cast<std::size_t>(2 * pairs) * sizeof(Bits);
  if (turned != row_bytes) __builtin_memcpy(row + 2 * pairs, x + 2 * pairs, row_bytes - turned);
  put(y, row, row_bytes);
}

// Calls row(head, token of the run) in the order in which they stand.
template <typename Row>
inline void each_row(const BlockShape& shape, const ContentSide& side, const TokenRun& run,
                     const Row& row) {
  if (side.head_step < side.token_inner) {
    for (std::int64_t i = 0; i < run.count; ++i) {
      for (std::int64_t head = 0; head < shape.num_heads; ++head) row(head, i);
    }
  } else {
    for (std::int64_t head = 0; head < shape.num_heads; ++head) {
      for (std::int64_t i = 0; i < run.count; ++i) row(head, i);
    }
  }
}

template <typename Element>
void key_dims(const Job<Element>& job, std::int64_t at) {
  const std::int64_t* const tokens = job.shape.key.tokens;
  auto* const target = job.target(at);
  for (std::size_t i = 0; i < job.num_runs; ++i) {
    const TokenRun& run = job.runs[i];
    const auto* const source = job.source(run) + at;
    for (std::int64_t token = 0; token < run.count; ++token) {
      key_row<Element>(job.shape, run.angles, source + tokens[run.source + token],
                       target + tokens[run.target + token]);
    }
  }
}

template <typename Element>
void value_dims(const Job<Element>& job, std::int64_t at) {
  using Bits = typename Element::Bits;
  const BlockShape& shape = job.shape;
  const ContentSide& side = shape.value.side;
  const std::int64_t* const tokens = shape.value.tokens;
  const auto row_bytes = static_cast<std::size_t>(shape.head_dim) * sizeof(Bits);
  const bool is_contiguous =
      side.token_group >= shape.block_tokens && side.token_inner == shape.head_dim;
  Bits* const target = job.target(at);
  for (std::size_t i = 0; i < job.num_runs; ++i) {
    const TokenRun& run = job.runs[i];
    const Bits* const source = job.source(run) + at;
    if (is_contiguous) {
      put_long(target + run.target * shape.head_dim, source + run.source * shape.head_dim,
               run.count * static_cast<std::int64_t>(row_bytes), job.ahead);
      continue;
    }
    for (std::int64_t token = 0; token < run.count; ++token) {
      put(target + tokens[run.target + token], source + tokens[run.source + token], row_bytes);
    }
  }
}

// K and V of which both are rows of dims: in the order in which they stand.
template <typename Element>
void token_rows(const Job<Element>& job) {
  const BlockShape& shape = job.shape;
  const SideOffsets& keys = shape.key;
  const SideOffsets& values = shape.value;
  const auto row_bytes = static_cast<std::size_t>(shape.head_dim) * sizeof(typename Element::Bits);
  for (std::size_t i = 0; i < job.num_runs; ++i) {
    const TokenRun& run = job.runs[i];
    each_row(shape, keys.side, run, [&](std::int64_t head, std::int64_t token) {
      const std::int64_t key_at = keys.side.base + head * keys.side.head_step;
      const std::int64_t value_at = values.side.base + head * values.side.head_step;
      const auto* const source = job.source(run);
      const std::int64_t from = run.source + token;
      const std::int64_t to = run.target + token;
      job.ahead->fetch(static_cast<std::int64_t>(2 * row_bytes / kLine));
      key_row<Element>(shape, run.angles, source + key_at + keys.tokens[from],
                       job.target(key_at) + keys.tokens[to]);
      put(job.target(value_at) + values.tokens[to], source + value_at + values.tokens[from],
          row_bytes);
    });
  }
}

}  // namespace
}  // namespace ATTNSTORE_PROCESSOR
}  // namespace attnstore
