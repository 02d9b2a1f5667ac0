#include "core/softmax_problem.h"

#include <gtest/gtest.h>

#include <string>
#include <type_traits>
#include <vector>

namespace flashattn {
namespace {

// Every index of a nest of loops, slowest first, lands where the strides say.
TEST(OuterLayout, OffsetsFollowTheStridesOfEveryRank) {
  OuterLayout layout;
  layout.rank = 3;
  const int64_t size[] = {2, 3, 4}, stride[] = {1000, -7, 0};
  for (int d = 0; d < 3; ++d) {
    layout.size[d] = size[d];
    layout.stride[d] = stride[d];
  }
  int64_t index = 0;
  for (int64_t i = 0; i < 2; ++i) {
    for (int64_t j = 0; j < 3; ++j) {
      for (int64_t k = 0; k < 4; ++k) EXPECT_EQ(layout.offset(index++), 1000 * i - 7 * j);
    }
  }
}

TEST(OuterLayout, OneDimensionAndNone) {
  OuterLayout layout;
  EXPECT_EQ(layout.offset(0), 0);
  layout.size[0] = 70000;
  layout.stride[0] = 70000;
  EXPECT_EQ(layout.offset(69999), int64_t{69999} * 70000);
}

template <class Type>
std::string name() {
  if constexpr (std::is_same_v<Type, float16>) return "float16";
  if constexpr (std::is_same_v<Type, bfloat16>) return "bfloat16";
  if constexpr (std::is_same_v<Type, float>) return "float32";
  if constexpr (std::is_same_v<Type, double>) return "float64";
  return "?";
}

const std::vector<DType> kAllTypes{DType::float16, DType::bfloat16, DType::float32, DType::float64,
                                   DType::boolean};

// The type read and the type written, as text; "" where there is no kernel.
std::string forward_pair(DType input, DType output) {
  std::string pair;
  const bool found = with_softmax_forward_types(
      input, output, [&]<class Read, class Written>(TypePair<Read, Written>) {
        pair = name<Read>() + " " + name<Written>();
      });
  EXPECT_EQ(found, !pair.empty());
  return pair;
}
std::string backward_pair(DType output, DType input) {
  std::string pair;
  const bool found = with_softmax_backward_types(
      output, input, [&]<class Read, class Written>(TypePair<Read, Written>) {
        pair = name<Read>() + " " + name<Written>();
      });
  EXPECT_EQ(found, !pair.empty());
  return pair;
}

TEST(SoftmaxTypes, SixPairsHaveKernels) {
  EXPECT_EQ(forward_pair(DType::float16, DType::float16), "float16 float16");
  EXPECT_EQ(forward_pair(DType::float16, DType::float32), "float16 float32");
  EXPECT_EQ(forward_pair(DType::bfloat16, DType::bfloat16), "bfloat16 bfloat16");
  EXPECT_EQ(forward_pair(DType::bfloat16, DType::float32), "bfloat16 float32");
  EXPECT_EQ(forward_pair(DType::float32, DType::float32), "float32 float32");
  EXPECT_EQ(forward_pair(DType::float64, DType::float64), "float64 float64");
  int found = 0;
  for (const DType input : kAllTypes) {
    for (const DType output : kAllTypes) found += !forward_pair(input, output).empty();
  }
  EXPECT_EQ(found, 6);
}

// Backward reads the output's type and writes the input's.
TEST(SoftmaxTypes, BackwardIsTheMirrorOfForward) {
  EXPECT_EQ(backward_pair(DType::float32, DType::float16), "float32 float16");
  for (const DType input : kAllTypes) {
    for (const DType output : kAllTypes) {
      EXPECT_EQ(backward_pair(output, input).empty(), forward_pair(input, output).empty());
    }
  }
}

}  // namespace
}  // namespace flashattn
