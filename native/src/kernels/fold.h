// The loops, for an element type E and an operator Op.
#pragma once

#include <stddef.h>

#include "elements.h"

namespace phalanx::kernels {
namespace {

template <class Op, class Pack>
inline Pack combine(Pack a, Pack b) {
  return Op::combine(a, b);
}
template <class Op>
inline Pair combine(Pair a, Pair b) {
  return {Op::combine(a.low, b.low), Op::combine(a.high, b.high)};
}

template <class Op, class Pack>
inline Pack finish(Pack x, double parameter) {
  return Op::finish(x, parameter);
}
template <class Op>
inline Pair finish(Pair x, double parameter) {
  return {Op::finish(x.low, parameter), Op::finish(x.high, parameter)};
}

// Combines elements [at, at + packs * E::lanes) of all sources in registers, so that each output is
// written once.
template <class E, class Op, size_t packs>
inline void fold_packs(typename E::Stored* out, const void* const* sources, size_t n_sources,
                       size_t at, double parameter) {
  typename E::Pack result[packs];
  const auto* source = static_cast<const typename E::Stored*>(sources[0]) + at;
  for (size_t p = 0; p < packs; ++p) result[p] = E::load(source + p * E::lanes);
  for (size_t s = 1; s < n_sources; ++s) {
    source = static_cast<const typename E::Stored*>(sources[s]) + at;
    for (size_t p = 0; p < packs; ++p) {
      result[p] = combine<Op>(result[p], E::load(source + p * E::lanes));
    }
  }
  for (size_t p = 0; p < packs; ++p) {
    E::store(out + at + p * E::lanes, finish<Op>(result[p], parameter));
  }
}

// Loads the first `count` elements of a pack; the others are zero.
template <class E>
inline typename E::Pack load_part(const void* source, size_t at, size_t count) {
  typename E::Stored whole[E::lanes] = {};
  __builtin_memcpy(whole, static_cast<const typename E::Stored*>(source) + at,
                   count * sizeof whole[0]);
  return E::load(whole);
}

// Combines the last elements, fewer than a pack.
template <class E, class Op>
inline void fold_rest(typename E::Stored* out, const void* const* sources, size_t n_sources,
                      size_t at, size_t count, double parameter) {
  typename E::Pack result = load_part<E>(sources[0], at, count);
  for (size_t s = 1; s < n_sources; ++s) {
    result = combine<Op>(result, load_part<E>(sources[s], at, count));
  }
  typename E::Stored whole[E::lanes];
  E::store(whole, finish<Op>(result, parameter));
  __builtin_memcpy(out + at, whole, count * sizeof whole[0]);
}

template <class E, class Op>
inline void fold_all(typename E::Stored* out, const void* const* sources, size_t n_sources,
                     size_t count, double parameter) {
  constexpr size_t packs = 4;
  size_t at = 0;
  for (; at + packs * E::lanes <= count; at += packs * E::lanes) {
    fold_packs<E, Op, packs>(out, sources, n_sources, at, parameter);
  }
  for (; at + E::lanes <= count; at += E::lanes) {
    fold_packs<E, Op, 1>(out, sources, n_sources, at, parameter);
  }
  if (at < count) fold_rest<E, Op>(out, sources, n_sources, at, count - at, parameter);
}

template <class E, class Op>
[[gnu::flatten]] void fold(void* out, const void* const* sources, size_t n_sources, size_t count,
                           double parameter) {
  auto* stored = static_cast<typename E::Stored*>(out);
  if (n_sources == 2) {  // the usual case, without a loop
    const void* const pair[] = {sources[0], sources[1]};
    fold_all<E, Op>(stored, pair, 2, count, parameter);
  } else {
    fold_all<E, Op>(stored, sources, n_sources, count, parameter);
  }
}

// Treats complex numbers as twice as many reals.
template <class E, class Op>
void fold_parts(void* out, const void* const* sources, size_t n_sources, size_t count,
                double parameter) {
  fold<E, Op>(out, sources, n_sources, 2 * count, parameter);
}

}  // namespace
}  // namespace phalanx::kernels
