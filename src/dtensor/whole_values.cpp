// Ops that mix elements of different ranks: done by every rank on whole values.

#include "dispatch/backward.h"
#include "dtensor/operands.h"
#include "dtensor/redistribute.h"
#include "dtensor/rules.h"

#include <c10/core/GradMode.h>

#include <sstream>
#include <utility>
#include <vector>

namespace fsdp2::dtensor {
namespace {

struct Whole {
  at::Tensor dtensor, value;
  bool written;
};

at::Tensor value_of(const Call& call, const at::Tensor& dtensor, const Spec& leader, bool written) {
  const SpecPtr& spec = spec_of(dtensor);
  if (spec->mesh != leader.mesh) {
    call.refuse(dtensor, "it meets a DTensor on another mesh, " + leader.mesh.to_string());
  }
  if (written && spec->partial) {
    call.refuse(dtensor, "it would write to a tensor that is not reduced yet");
  }
  const at::Tensor value = local_of(redistributed(finished(dtensor), all_replicate(*spec)));
  return written ? value.clone() : value;
}

void check_plain(const Call& call, const at::Tensor& plain, const at::Tensor& first, bool written,
                 bool recorded) {
  if (dispatch::inside_backward()) return;  // global, as gradients are
  if (written) call.refuse(first, "it would write to a plain tensor");
  if (plain.requires_grad() && c10::GradMode::is_enabled()) {
    call.refuse(first,
                "a plain tensor that requires grad meets it; make it a DTensor "
                "(distribute_tensor, DTensor::from_local) or detach() it");
  }
  if (plain.numel() <= 1) return;
  if (!recorded && plain.sizes() == first.sizes()) return;
  refuse_plain(call, first, plain);
}

constexpr std::string_view kLinearAlgebra =
    "mm bmm mv dot vdot addmm addmv addr addbmm baddbmm _cdist_forward _cdist_backward "
    "_euclidean_dist cholesky cholesky_inverse cholesky_solve linalg_cholesky_ex linalg_cross "
    "_linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd linalg_eig "
    "linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex linalg_lstsq linalg_lu "
    "linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_qr linalg_solve_triangular "
    "linalg_pinv trace triangular_solve";

constexpr std::string_view kAcross =
    "aminmax bincount block_diag constant_pad_nd count_nonzero.dim_IntList "
    "diag_embed diagonal_backward diagonal_scatter embedding embedding_dense_backward flip gather "
    "grid_sampler_2d histc index.Tensor index_add index_copy index_fill index_put index_reduce "
    "index_select isin logcumsumexp logsumexp masked_scatter masked_select median nanmedian "
    "nonzero put repeat repeat_interleave renorm roll rot90 scatter scatter_add scatter_reduce "
    "select_backward select_scatter slice_backward slice_scatter std std_mean take tril "
    "triu unfold_backward unique_consecutive unique_dim _unique _unique2 var var_mean "
    "_weight_norm_interface "
    "_weight_norm_interface_backward";

constexpr std::string_view kLosses =
    "binary_cross_entropy binary_cross_entropy_backward huber_loss huber_loss_backward mse_loss "
    "mse_loss_backward smooth_l1_loss smooth_l1_loss_backward soft_margin_loss "
    "soft_margin_loss_backward";

constexpr std::string_view kInPlace =
    "addbmm_ addmm_ addmv_ addr_ baddbmm_ eye.out eye.m_out index_add_ index_copy_ index_fill_ "
    "_index_put_impl_ index_put_ masked_scatter_ put_ renorm_ scatter_ scatter_add_ "
    "scatter_reduce_ tril_ triu_";

constexpr std::string_view kAlongDim =
    "sort topk cumsum cumprod cummax cummin _softmax _log_softmax _softmax_backward_data "
    "_log_softmax_backward_data";

}  // namespace

void run_on_whole(Call& call) {
  at::Tensor first;
  bool recorded = false;
  dispatch::map_arguments(call.info, call.stack, [&](const at::Tensor& tensor, size_t index) {
    if (!is_dtensor(tensor)) return std::optional<at::Tensor>();
    if (!first.defined()) first = tensor;
    recorded = recorded || refuses_plain(tensor, call.info.written[index]);
    return std::optional<at::Tensor>();
  });
  dispatch::map_arguments(call.info, call.stack, [&](const at::Tensor& tensor, size_t index) {
    if (!is_dtensor(tensor)) check_plain(call, tensor, first, call.info.written[index], recorded);
    return std::optional<at::Tensor>();
  });
  const SpecPtr out = all_replicate(*spec_of(first));
  std::vector<at::Tensor> plain_written;
  std::vector<Whole> wholes;  // each gathered once, however often it is given
  dispatch::map_arguments(call.info, call.stack, [&](const at::Tensor& tensor, size_t index) {
    if (!is_dtensor(tensor)) {
      if (call.info.written[index]) plain_written.push_back(tensor);
      return std::optional<at::Tensor>();
    }
    for (Whole& whole : wholes) {
      if (!whole.dtensor.is_same(tensor)) continue;
      if (!call.info.written[index] || whole.written) return std::optional<at::Tensor>(whole.value);
    }
    const bool written = call.info.written[index];
    wholes.push_back({tensor, value_of(call, tensor, *out, written), written});
    return std::optional<at::Tensor>(wholes.back().value);
  });
  call.run();
  for (const Whole& whole : wholes) {
    if (!whole.written) continue;
    if (whole.value.sizes() != whole.dtensor.sizes()) {
      call.refuse(whole.dtensor, "it would change the size of what it writes");
    }
    announce_write(whole.dtensor);
    local_of(whole.dtensor).copy_(part_of(whole.value, *spec_of(whole.dtensor)));
  }
  dispatch::map_returns(call.info, call.stack, [&](const at::Tensor& result) {
    for (const at::Tensor& plain : plain_written) {
      if (result.is_same(plain)) return std::optional<at::Tensor>();
    }
    for (const Whole& whole : wholes) {
      if (!result.is_same(whole.value)) continue;
      if (whole.written) return std::optional<at::Tensor>(whole.dtensor);
      return std::optional<at::Tensor>(wrap(result.clone(), out, result.sizes()));
    }
    return std::optional<at::Tensor>(wrap(result, out, result.sizes()));
  });
}

namespace {

/// Same size but along `dim`, which stays on its rank if every rank has the whole of it.
void along_uncut_dim(Call& call) {
  const at::Tensor self = call.arg(0).toTensor();
  const SpecPtr& spec = spec_of(self);
  bool alike = is_dtensor(self) && !call.info.mutates && self.dim() > 0;
  dispatch::map_arguments(call.info, call.stack, [&](const at::Tensor& tensor, size_t) {
    alike =
        alike && is_dtensor(tensor) && spec_of(tensor) == spec && tensor.sizes() == self.sizes();
    return std::optional<at::Tensor>();
  });
  const auto index = call.find("dim");
  if (!alike || spec->partial || !index || !call.arg(*index).isInt()) return run_on_whole(call);
  const int64_t dim = at::maybe_wrap_dim(call.arg(*index).toInt(), self.dim());
  if (shards(*spec, dim)) return run_on_whole(call);
  dispatch::map_arguments(call.info, call.stack, [&](const at::Tensor& tensor, size_t) {
    return std::optional<at::Tensor>(local_of(tensor));
  });
  call.run();
  dispatch::map_returns(call.info, call.stack, [&](const at::Tensor& result) {
    std::vector<int64_t> sizes = self.sizes().vec();
    sizes[dim] = result.size(dim);
    return std::optional<at::Tensor>(wrap(result, spec, sizes));
  });
}

}  // namespace

RuleTable whole_value_rules() {
  RuleTable table;
  add_rules(table, run_on_whole, kLinearAlgebra);
  add_rules(table, run_on_whole, kAcross);
  add_rules(table, run_on_whole, kLosses);
  add_rules(table, run_on_whole, kInPlace);
  add_rules(table, along_uncut_dim, kAlongDim);
  return table;
}

}  // namespace fsdp2::dtensor
