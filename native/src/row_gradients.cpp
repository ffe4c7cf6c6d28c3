#include "phalanx/row_gradients.h"

#include <algorithm>

namespace phalanx {
namespace {

// A row, where its gradient is, and by what that is multiplied.
template <class T>
struct Term {
  std::int64_t row;
  const T* gradient;
  T factor;
};

template <class T>
bool comes_before(const Term<T>& one, const Term<T>& other) {
  return one.row < other.row;
}

// Sums of terms that are in ascending order of rows.
template <class T>
std::size_t sums_of(const std::vector<Term<T>>& terms, std::size_t width, T divisor,
                    const GradientRoom& room) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < terms.size(); ++count) {
    const std::int64_t row = terms[i].row;
    T* __restrict sum = static_cast<T*>(room.gradients) + count * width;
    room.rows[count] = row;
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
            const RowShare& share) {
  const auto* weights = static_cast<const T*>(batch.weights);
  const auto* outputs = static_cast<const T*>(batch.outputs);
  const bool apart = batch.bags.offsets == nullptr;
  const std::size_t bags = apart ? batch.list.count : batch.bags.count;
  for (std::size_t bag = 0; bag < bags; ++bag) {
    const auto begin = apart ? bag : static_cast<std::size_t>(batch.bags.offsets[bag]);
    const std::size_t end = apart            ? bag + 1
                            : bag + 1 < bags ? static_cast<std::size_t>(batch.bags.offsets[bag + 1])
                                             : batch.list.count;
    const T equal =
        batch.pooling == Pooling::mean && end != begin ? T{1} / static_cast<T>(end - begin) : T{1};
    for (std::size_t i = begin; i < end; ++i) {
      if (share.shares == 1 || batch.list.rows[i] % share.shares == share.rest) {
        terms.push_back(
            {batch.list.rows[i], outputs + bag * width, weights == nullptr ? equal : weights[i]});
      }
    }
  }
}

template <class T>
std::size_t add(const std::vector<BagGradients>& batches, std::size_t width, T divisor,
                const RowShare& share, const GradientRoom& room) {
  std::vector<Term<T>> terms;
  for (const BagGradients& batch : batches) {
    const auto begin = static_cast<std::ptrdiff_t>(terms.size());
    append(terms, batch, width, share);
    if (!std::is_sorted(terms.begin() + begin, terms.end(), comes_before<T>)) {
      std::stable_sort(terms.begin() + begin, terms.end(), comes_before<T>);
    }
    std::inplace_merge(terms.begin(), terms.begin() + begin, terms.end(), comes_before<T>);
  }
  return sums_of(terms, width, divisor, room);
}

}  // namespace

std::size_t add_up(const std::vector<BagGradients>& batches, std::size_t width, DType dtype,
                   double divisor, const RowShare& share, const GradientRoom& room) {
  return dtype == DType::float64
             ? add<double>(batches, width, divisor, share, room)
             : add<float>(batches, width, static_cast<float>(divisor), share, room);
}

}  // namespace phalanx
