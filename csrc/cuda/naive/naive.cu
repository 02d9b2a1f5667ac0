// Attention in three materialised steps on CUDA: a batched product, one kernel, a batched product;
// and backward in four products around one kernel.
#include <algorithm>
#include <type_traits>

#include "core/tile_schedule.h"
#include "cuda/launch.cuh"
#include "cuda/naive.h"
#include "cuda/naive/copy_kernel.cuh"
#include "cuda/naive/gradient_kernel.cuh"
#include "cuda/naive/matrices.h"
#include "cuda/naive/products.h"
#include "cuda/naive/round_kernel.cuh"
#include "cuda/naive/softmax_kernel.cuh"

namespace flashattn::cuda {
namespace naive {
namespace {

// What forward and backward have in common. Query heads of a group are rows of one matrix:
// (batch, heads_kv, group * len_q, columns).
template <class Element>
class NaiveCall {
  using Real = Accumulator<Element>;
  static constexpr DType kElement = kDType<Element>, kReal = kDType<Real>;
  static constexpr bool kRounds = kElement != kReal;

 public:
  NaiveCall(const OpScope& scope, const AttentionProblem& p, const Workspace& workspace)
      : scope_(scope),
        p_(p),
        workspace_(workspace),
        products_(scope),
        pair_count_(p.sequences.count * p.heads_q * p.sequences.storage_q * p.sequences.storage_k) {
  }

  void forward(const NaiveOutputs& outputs) const {
    const bool dropout = static_cast<bool>(p_.dropout);
    Element* probs = static_cast<Element*>(outputs.probs.data);
    Element* weights = static_cast<Element*>(outputs.weights.data);
    if (dropout && !weights) weights = pairs<Element>();
    Real* scores;  // in place where the element type is exact enough
    if constexpr (kRounds) {
      scores = pairs<Real>();
    } else {
      scores = dropout ? weights : probs;
    }

    Real* corrections = kRounds ? rows() : nullptr;
    multiply(readable(p_.query, group()), transposed_of(readable(p_.key, 1)),
             pair_matrices(scores));
    launch_rows(
        naive_softmax_kernel<Element>,
        SoftmaxArguments<Element>{.problem = p_,
                                  .scores = scores,
                                  .probs = probs,
                                  .weights = weights,
                                  .lse = static_cast<Real*>(outputs.lse.data),
                                  .corrections = corrections,
                                  .max_logits = static_cast<float*>(outputs.max_logits.data),
                                  .wide = wide(scores, probs, weights)});
    const Matrices used = pair_matrices(dropout ? weights : probs);
    const UntypedView4 value = readable(p_.value, 1, true);
    if constexpr (kRounds) {
      const UntypedView4 exact = contiguous_view(
          workspace_(elements_of(outputs.out) * int64_t{sizeof(Real)}), outputs.out.size);
      products_.multiply(used, {value, kElement}, {*grouped(exact, group()), kReal});
      round_out(exact, corrections, outputs.out);
    } else {
      multiply(used, value, outputs.out, group());
    }
  }

  void backward(const NaiveBackwardInputs& inputs, const BackwardOutputs& outputs,
                const NaiveGradientTerms& terms) const {
    const Element* probs = static_cast<const Element*>(inputs.probs.data);
    Real* grads = pairs<Real>();
    Element* grad_dots;
    if constexpr (kRounds) {
      grad_dots = pairs<Element>();
    } else {
      grad_dots = grads;
    }
    Element* weights = p_.dropout && outputs.grad_value ? pairs<Element>() : nullptr;
    Real* dots = p_.softcap > 0 ? pairs<Real>() : nullptr;

    const UntypedView4 query = readable(p_.query, group());
    const UntypedView4 grad_out = readable(inputs.grad_out, group());
    if (dots) multiply(query, transposed_of(readable(p_.key, 1)), pair_matrices(dots));
    multiply(grad_out, transposed_of(readable(p_.value, 1)), pair_matrices(grads));

    const auto* grad_weights = static_cast<const Element*>(inputs.grad_weights.data);
    launch_rows(naive_gradient_kernel<Element>,
                GradientArguments<Element>{.problem = p_,
                                           .lse = inputs.lse,
                                           .grad_lse = inputs.grad_lse,
                                           .probs = probs,
                                           .grad_weights = grad_weights,
                                           .dots = dots,
                                           .grads = grads,
                                           .grad_dots = grad_dots,
                                           .weights = weights,
                                           .grad_scores = static_cast<Real*>(terms.scores),
                                           .row_alibi = static_cast<Real*>(terms.row_alibi),
                                           .row_sinks = static_cast<Real*>(terms.row_sinks),
                                           .wide = wide(probs, grad_weights)});

    const Matrices grad_scores = pair_matrices(grad_dots);
    if (outputs.grad_query) {
      multiply(grad_scores, readable(p_.key, 1, true), outputs.grad_query, group());
    }
    if (outputs.grad_key) multiply(transposed_of(grad_scores), query, outputs.grad_key, 1);
    if (outputs.grad_value) {
      const Matrices used = pair_matrices(weights ? weights : probs);
      multiply(transposed_of(used), grad_out, outputs.grad_value, 1);
    }
  }

 private:
  int64_t group() const { return p_.group_size(); }

  // Scratch memory of one number for each pair of a query and a key.
  template <class Number>
  Number* pairs() const {
    return static_cast<Number*>(workspace_(pair_count_ * int64_t{sizeof(Number)}));
  }

  // One for each row of a head.
  Real* rows() const {
    const int64_t count = p_.sequences.count * p_.heads_q * p_.sequences.storage_q;
    return static_cast<Real*>(workspace_(count * int64_t{sizeof(Real)}));
  }

  template <class Number>
  Matrices pair_matrices(Number* data) const {
    void* memory = const_cast<std::remove_const_t<Number>*>(data);
    const Sequences& s = p_.sequences;
    return {contiguous_view(memory, {s.count, p_.heads_kv, group() * s.storage_q, s.storage_k}),
            kDType<std::remove_const_t<Number>>};
  }

  static Matrices transposed_of(const Matrices& m) { return {transposed(m.view), m.dtype}; }
  static UntypedView4 transposed_of(const UntypedView4& view) { return transposed(view); }

  // As matrices that cuBLAS reads: in place, or a copy. `clean`: a product multiplies what lies
  // past the key lengths by 0, and it may be NaN.
  UntypedView4 readable(UntypedView4 view, int64_t group, bool clean = false) const {
    clean = clean && p_.sequences.key_lengths;
    if (const auto matrices = grouped(view, group); matrices && layout_of(*matrices) && !clean) {
      return *matrices;
    }
    const UntypedView4 copy =
        contiguous_view(workspace_(elements_of(view) * int64_t{sizeof(Element)}), view.size);
    copy_view(view, copy, clean ? p_.sequences : Sequences{});
    return *grouped(copy, group);
  }

  void multiply(const UntypedView4& a, const UntypedView4& b, const Matrices& c) const {
    products_.multiply({a, kElement}, {b, kElement}, c);
  }
  void multiply(const Matrices& a, const UntypedView4& b, const UntypedView4& c,
                int64_t group) const {
    const auto matrices = grouped(c, group);
    if (matrices && layout_of(*matrices)) {
      return products_.multiply(a, {b, kElement}, {*matrices, kElement});
    }
    const UntypedView4 result =
        contiguous_view(workspace_(elements_of(c) * int64_t{sizeof(Element)}), c.size);
    products_.multiply(a, {b, kElement}, {*grouped(result, group), kElement});
    copy_view(result, c, {});
  }

  void copy_view(const UntypedView4& from, const UntypedView4& to, const Sequences& lengths) const {
    const int64_t count = elements_of(to);
    if (count == 0) return;
    using Word = std::conditional_t<sizeof(Element) == 2, uint16_t,
                                    std::conditional_t<sizeof(Element) == 4, uint32_t, uint64_t>>;
    launch(scope_, {divide_up(count, 256), 256}, naive_copy_kernel<Word>, from, to, lengths, count);
  }

  void round_out(const UntypedView4& exact, const Real* corrections,
                 const UntypedView4& out) const {
    const int64_t count = elements_of(out);
    if (count == 0) return;
    launch(scope_, {divide_up(count, 256), 256}, naive_round_kernel<Element>, exact, corrections,
           out, count);
  }

  // Whether rows consist of whole chunks that begin at multiples of 16 bytes. (What the kernels'
  // caller has not given comes from the allocator.)
  template <class... Pointers>
  bool wide(const Pointers*... pointers) const {
    return p_.sequences.storage_k % kChunk == 0 &&
           ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
  }

  template <class Arguments>
  void launch_rows(void (*kernel)(Arguments, Lanes), const Arguments& arguments) const {
    const int64_t rows = p_.sequences.count * p_.heads_q * p_.sequences.storage_q;
    const int64_t wanted = divide_up(p_.sequences.storage_k, kChunk * kHeldChunks<Real>);
    int bits = 2;
    while ((1 << bits) < wanted && (1 << bits) < kMostThreads) ++bits;
    const int threads = bits <= 5 ? 128 : 1 << bits;
    launch(scope_, {divide_up(rows, threads >> bits), threads}, kernel, arguments, Lanes{bits});
  }

  const OpScope& scope_;
  const AttentionProblem& p_;
  const Workspace& workspace_;
  const Products products_;
  const int64_t pair_count_;
};

bool has_rows(const AttentionProblem& p) {
  return p.sequences.count > 0 && p.heads_q > 0 && p.sequences.storage_q > 0;
}

}  // namespace
}  // namespace naive

void naive_forward(const AttentionProblem& problem, const NaiveOutputs& outputs, int device,
                   const Workspace& workspace) {
  if (!naive::has_rows(problem)) return;
  const OpScope scope("naive_attention_forward", device);
  with_element(problem.dtype, [&]<class Element>(Element) {
    naive::NaiveCall<Element>(scope, problem, workspace).forward(outputs);
  });
}

void naive_backward(const AttentionProblem& problem, const NaiveBackwardInputs& inputs,
                    const BackwardOutputs& outputs, const NaiveGradientTerms& terms, int device,
                    const Workspace& workspace) {
  if (!naive::has_rows(problem)) return;
  const OpScope scope("naive_attention_backward", device);
  with_element(problem.dtype, [&]<class Element>(Element) {
    naive::NaiveCall<Element>(scope, problem, workspace).backward(inputs, outputs, terms);
  });
}

}  // namespace flashattn::cuda
