// summary(): shapes, counts, the table, and that the module is left as it was.
#include <doctest/doctest.h>

#include <lockstep/nn/nn.h>
#include <lockstep/tensor/random.h>

#include "golden.h"

using namespace lockstep;

namespace {

struct Net : nn::Module {
  nn::Sequential body{nn::Conv2d{1, 32, 3}, nn::ReLU{}, nn::BatchNorm2d{32}, nn::MaxPool2d{2},
                      nn::Flatten{}};
  nn::Linear out{5408, 10}, unused{10, 10, {.bias = false}};
  Tensor forward(Tensor x) { return out(body(x)); }
  LOCKSTEP_MODULE(Net, body, out, unused)
};

}  // namespace

TEST_CASE("summary: the table") {
  Net net;
  net.unused.weight.requires_grad_(false);
  CHECK(nn::summary(net, zeros({4, 1, 28, 28})).to_string() ==
        "Layer                           Output           Parameters\n"
        "-----------------------------------------------------------\n"
        "Net                             [4, 10]                   -\n"
        "  body (Sequential)             [4, 5408]                 -\n"
        "    body.0 (Conv2d 1->32, 3x3)  [4, 32, 26, 26]         320\n"
        "    body.1 (ReLU)               [4, 32, 26, 26]           -\n"
        "    body.2 (BatchNorm2d 32)     [4, 32, 26, 26]          64\n"
        "    body.3 (MaxPool2d 2x2)      [4, 32, 13, 13]           -\n"
        "    body.4 (Flatten)            [4, 5408]                 -\n"
        "  out (Linear 5408->10)         [4, 10]              54,090\n"
        "  unused (Linear 10->10)        -                       100\n"
        "Parameters: 54,574 (54,474 trainable), 214 KiB\n");
}

TEST_CASE("summary: the module is left as it was, also when forward throws") {
  Net net;
  net.out.eval();
  const Tensor mean = net.body.at<nn::BatchNorm2d>(2).running_mean.clone();
  for (const int64_t size : {28, 29}) {
    if (size == 28)
      nn::summary(net, ones({2, 1, size, size}));
    else
      CHECK_THROWS_AS(nn::summary(net, ones({2, 1, size + 5, size})), ShapeError);
    CHECK(net.is_training());
    CHECK(net.body[2].is_training());
    CHECK(!net.out.is_training());
    CHECK(difference(net.body.at<nn::BatchNorm2d>(2).running_mean, mean) == 0);
  }
  CHECK(!net(ones({2, 1, 28, 28})).grad().defined());
}

TEST_CASE("summary: tied parameters count once; rows tell what was called") {
  nn::Sequential net{nn::Linear{3, 3}, nn::ReLU{}, nn::Linear{3, 3}};
  net.at<nn::Linear>(2).weight = net.at<nn::Linear>(0).weight;
  const nn::Summary s = nn::summary(net, zeros({2, 3}));
  CHECK(s.parameters == 15);
  CHECK(s.trainable == 15);
  CHECK(s.bytes == 60);
  REQUIRE(s.rows.size() == 4);
  CHECK(s.rows[2].called);  // the ReLU, though Sequential would fuse it
  CHECK(s.rows[2].output == Shape{2, 3});
  CHECK(s.rows[3].parameters == 3);
}
