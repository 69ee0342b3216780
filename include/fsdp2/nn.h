#pragma once

// Modules of torch::nn with a boundary (fsdp2/hooked.h): `fsdp2::nn::Linear(4, 3)` is used as
// torch::nn::Linear(4, 3) is, and takes hooks and the casts of mixed precision. For others write
// fsdp2::HookedHolder<torch::nn::...Impl>.

#include <fsdp2/hooked.h>

#include <torch/nn/modules.h>

namespace fsdp2::nn {

using Linear = HookedHolder<torch::nn::LinearImpl>;
using Bilinear = HookedHolder<torch::nn::BilinearImpl>;
using Identity = HookedHolder<torch::nn::IdentityImpl>;
using Flatten = HookedHolder<torch::nn::FlattenImpl>;
using Unflatten = HookedHolder<torch::nn::UnflattenImpl>;
using Embedding = HookedHolder<torch::nn::EmbeddingImpl>;
using EmbeddingBag = HookedHolder<torch::nn::EmbeddingBagImpl>;
using Conv1d = HookedHolder<torch::nn::Conv1dImpl>;
using Conv2d = HookedHolder<torch::nn::Conv2dImpl>;
using Conv3d = HookedHolder<torch::nn::Conv3dImpl>;
using ConvTranspose1d = HookedHolder<torch::nn::ConvTranspose1dImpl>;
using ConvTranspose2d = HookedHolder<torch::nn::ConvTranspose2dImpl>;
using ConvTranspose3d = HookedHolder<torch::nn::ConvTranspose3dImpl>;
using BatchNorm1d = HookedHolder<torch::nn::BatchNorm1dImpl>;
using BatchNorm2d = HookedHolder<torch::nn::BatchNorm2dImpl>;
using BatchNorm3d = HookedHolder<torch::nn::BatchNorm3dImpl>;
using InstanceNorm1d = HookedHolder<torch::nn::InstanceNorm1dImpl>;
using InstanceNorm2d = HookedHolder<torch::nn::InstanceNorm2dImpl>;
using InstanceNorm3d = HookedHolder<torch::nn::InstanceNorm3dImpl>;
using GroupNorm = HookedHolder<torch::nn::GroupNormImpl>;
using LayerNorm = HookedHolder<torch::nn::LayerNormImpl>;
using RNN = HookedHolder<torch::nn::RNNImpl>;
using LSTM = HookedHolder<torch::nn::LSTMImpl>;
using GRU = HookedHolder<torch::nn::GRUImpl>;
using RNNCell = HookedHolder<torch::nn::RNNCellImpl>;
using LSTMCell = HookedHolder<torch::nn::LSTMCellImpl>;
using GRUCell = HookedHolder<torch::nn::GRUCellImpl>;
using MultiheadAttention = HookedHolder<torch::nn::MultiheadAttentionImpl>;
using Transformer = HookedHolder<torch::nn::TransformerImpl>;
using TransformerEncoder = HookedHolder<torch::nn::TransformerEncoderImpl>;
using TransformerEncoderLayer = HookedHolder<torch::nn::TransformerEncoderLayerImpl>;
using TransformerDecoder = HookedHolder<torch::nn::TransformerDecoderImpl>;
using TransformerDecoderLayer = HookedHolder<torch::nn::TransformerDecoderLayerImpl>;
using AdaptiveLogSoftmaxWithLoss = HookedHolder<torch::nn::AdaptiveLogSoftmaxWithLossImpl>;
using PReLU = HookedHolder<torch::nn::PReLUImpl>;
using Dropout = HookedHolder<torch::nn::DropoutImpl>;
using Dropout2d = HookedHolder<torch::nn::Dropout2dImpl>;
using Dropout3d = HookedHolder<torch::nn::Dropout3dImpl>;
using AlphaDropout = HookedHolder<torch::nn::AlphaDropoutImpl>;
using FeatureAlphaDropout = HookedHolder<torch::nn::FeatureAlphaDropoutImpl>;
using GELU = HookedHolder<torch::nn::GELUImpl>;
using ReLU = HookedHolder<torch::nn::ReLUImpl>;
using SiLU = HookedHolder<torch::nn::SiLUImpl>;
using Sigmoid = HookedHolder<torch::nn::SigmoidImpl>;
using Tanh = HookedHolder<torch::nn::TanhImpl>;
using Softmax = HookedHolder<torch::nn::SoftmaxImpl>;
using LogSoftmax = HookedHolder<torch::nn::LogSoftmaxImpl>;
using AvgPool1d = HookedHolder<torch::nn::AvgPool1dImpl>;
using AvgPool2d = HookedHolder<torch::nn::AvgPool2dImpl>;
using AvgPool3d = HookedHolder<torch::nn::AvgPool3dImpl>;
using MaxPool1d = HookedHolder<torch::nn::MaxPool1dImpl>;
using MaxPool2d = HookedHolder<torch::nn::MaxPool2dImpl>;
using MaxPool3d = HookedHolder<torch::nn::MaxPool3dImpl>;
using AdaptiveAvgPool1d = HookedHolder<torch::nn::AdaptiveAvgPool1dImpl>;
using AdaptiveAvgPool2d = HookedHolder<torch::nn::AdaptiveAvgPool2dImpl>;
using AdaptiveAvgPool3d = HookedHolder<torch::nn::AdaptiveAvgPool3dImpl>;
using Upsample = HookedHolder<torch::nn::UpsampleImpl>;

}  // namespace fsdp2::nn
