// The command line of mnist.
#pragma once

#include <string>

#include "ddp_flags.h"
#include "same_options.h"

struct Options {
  int epochs = 3, threads = 0;
  int64_t batch_size = 64, accumulation = 1, train_samples = 0, checkpoint_every = 0;
  double lr = 0.05;
  uint64_t seed = 0;
  std::string data = "data/mnist", save, checkpoint, log_loss;
  DdpFlags ddp;

  /// Those that decide what a rank communicates or computes.
  NamedOptions shared() const {
    using lockstep::str_cat;
    return {{"--epochs", str_cat(epochs)},
            {"--batch_size", str_cat(batch_size)},
            {"--gradient_accumulation_steps", str_cat(accumulation)},
            {"--train_samples", str_cat(train_samples)},
            {"--lr", str_cat(lr)},
            {"--seed", str_cat(seed)},
            {"--save", presence(save)},
            {"--checkpoint", presence(checkpoint)},
            {"--checkpoint_every", str_cat(checkpoint_every)},
            {"--log_loss", presence(log_loss)}};
  }
};

inline Options parse(int argc, char** argv) {
  Options o;
  CLI::App app{
      "Trains a convolutional network on MNIST, on one process or on all that a launcher started."};
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.add_option("--epochs", o.epochs, "passes over the training set")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option(spellings("batch_size"), o.batch_size, "samples of a micro-batch on each rank")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option(spellings("gradient_accumulation_steps"), o.accumulation,
                 "micro-batches whose gradients make one step")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--lr", o.lr, "peak learning rate")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--seed", o.seed, "of initialisation and of the order of samples")
      ->capture_default_str();
  app.add_option("--data", o.data, "folder of the four MNIST files")->capture_default_str();
  app.add_option(spellings("train_samples"), o.train_samples,
                 "use only so many of the training samples, for a short trial")
      ->check(CLI::PositiveNumber);
  app.add_option("--save", o.save, "safetensors file for the trained model; not saved without");
  app.add_option("--checkpoint", o.checkpoint,
                 "file to resume from if it is there; written after each epoch");
  app.add_option(spellings("checkpoint_every"), o.checkpoint_every,
                 "write it after every so many steps as well")
      ->check(CLI::PositiveNumber);
  app.add_option(spellings("log_loss"), o.log_loss,
                 "file for lines of step and mean loss over all ranks");
  app.add_option("--threads", o.threads,
                 "threads a rank; the launcher's share of the processors by default")
      ->check(CLI::PositiveNumber);
  o.ddp.add_to(app);
  parse_or_exit(app, argc, argv);
  return o;
}
