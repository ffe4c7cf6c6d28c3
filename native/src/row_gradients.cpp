#include "phalanx/row_gradients.h"

#include <algorithm>

namespace phalanx {
namespace {

// A row, the address of its gradient, and the factor of the gradient.
template <class T>
struct Term {
  std::int64_t row;
  const T* gradient;
  T factor;
};

template <class T>
bool precedes(const Term<T>& one, const Term<T>& other) {
  return one.row < other.row;
}

// Sums the terms, which are in ascending order of rows.
template <class T>
std::size_t sum_terms(const std::vector<Term<T>>& terms, std::size_t width, T divisor,
                      const GradientOutput& output) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < terms.size(); ++count) {
    const std::int64_t row = terms[i].row;
    T* __restrict sum = static_cast<T*>(output.gradients) + count * width;
    output.rows[count] = row;
    for (std::size_t k = 0; k < width; ++k) {
      sum[k] = terms[i].factor * terms[i].gradient[k];
    }
    for (++i; i < terms.size() && terms[i].row == row; ++i) {
      for (std::size_t k = 0; k < width; ++k) {
        sum[k] += terms[i].factor * terms[i].gradient[k];
      }
    }
    if (divisor != T{1}) {
      for (std::size_t k = 0; k < width; ++k) {
        sum[k] /= divisor;
      }
    }
  }
  return count;
}

template <class T>
void append(std::vector<Term<T>>& terms, const BagGradients& batch, std::size_t width,
            const RowShard& shard) {
  const auto* weights = static_cast<const T*>(batch.weights);
  const auto* outputs = static_cast<const T*>(batch.outputs);
  const bool unpooled = batch.bags.offsets == nullptr;
  const std::size_t bags = unpooled ? batch.list.count : batch.bags.count;
  for (std::size_t bag = 0; bag < bags; ++bag) {
    const auto begin = unpooled ? bag : static_cast<std::size_t>(batch.bags.offsets[bag]);
    const std::size_t end = unpooled         ? bag + 1
                            : bag + 1 < bags ? static_cast<std::size_t>(batch.bags.offsets[bag + 1])
                                             : batch.list.count;
    const T equal =
        batch.pooling == Pooling::mean && end != begin ? T{1} / static_cast<T>(end - begin) : T{1};
    for (std::size_t i = begin; i < end; ++i) {
      if (shard.count == 1 || batch.list.rows[i] % shard.count == shard.remainder) {
        terms.push_back(
            {batch.list.rows[i], outputs + bag * width, weights == nullptr ? equal : weights[i]});
      }
    }
  }
}

template <class T>
std::size_t add(const std::vector<BagGradients>& batches, std::size_t width, T divisor,
                const RowShard& shard, const GradientOutput& output) {
  std::vector<Term<T>> terms;
  for (const BagGradients& batch : batches) {
    const auto begin = static_cast<std::ptrdiff_t>(terms.size());
    append(terms, batch, width, shard);
    if (!std::is_sorted(terms.begin() + begin, terms.end(), precedes<T>)) {
      std::stable_sort(terms.begin() + begin, terms.end(), precedes<T>);
    }
    std::inplace_merge(terms.begin(), terms.begin() + begin, terms.end(), precedes<T>);
  }
  return sum_terms(terms, width, divisor, output);
}

}  // namespace

std::size_t coalesce_gradients(const std::vector<BagGradients>& batches, std::size_t width,
                               DType dtype, double divisor, const RowShard& shard,
                               const GradientOutput& output) {
  return dtype == DType::float64
             ? add<double>(batches, width, divisor, shard, output)
             : add<float>(batches, width, static_cast<float>(divisor), shard, output);
}

}  // namespace phalanx
